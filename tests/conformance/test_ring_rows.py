"""Tests the rows of a ring, and that all workers of a ring have the same bits."""

import pytest

from tests.conformance.ring_rows import outcomes_by_rank
from tests.conformance.row_checks import cases_of, row_checks
from tests.conformance.rows import ROWS

RING_ROWS = [row for row in ROWS if row.ring is not None]
TestRingRows = row_checks(RING_ROWS)


@pytest.mark.parametrize("row", cases_of(RING_ROWS, only_full=True))
def test_workers_are_bit_identical(row):
    check_bit_identical(row, only_quick=False)


@pytest.mark.parametrize("row", cases_of([row for row in RING_ROWS if row.in_quick]))
def test_workers_of_the_quick_trials_are_bit_identical(row):
    check_bit_identical(row, only_quick=True)


def check_bit_identical(row, only_quick):
    first, *others = outcomes_by_rank(row, only_quick)
    assert len(others) == row.num_workers - 1
    for other in others:
        for trial, outcomes in first.items():
            for mine, theirs in zip(outcomes, other[trial], strict=True):
                assert mine.evaluation == theirs.evaluation
                for name, value in mine.values.items():
                    assert value.tobytes() == theirs.values[name].tobytes(), name
