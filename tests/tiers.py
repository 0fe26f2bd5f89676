"""Whether all tests run or the quick ones; tables of which the quick tests run the first cases."""

from collections.abc import Iterable

import pytest

# Set by tests/conftest.py.
runs_full = False


def first_quick(cases: Iterable, num_quick: int = 1) -> list:
    """The cases for `pytest.mark.parametrize`; all but the first `num_quick` are marked `full`."""
    found = []
    for index, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=[] if index < num_quick else [pytest.mark.full]))
    return found
