"""Tests the rows of a ring, and that all workers of a ring have the same bits."""

import pytest

from tests import tiers
from tests.conformance.ring_rows import outcomes_by_rank
from tests.conformance.row_checks import cases_of, row_checks
from tests.conformance.rows import ROWS

RING_ROWS = [row for row in ROWS if row.ring is not None]
TestRingRows = row_checks(RING_ROWS)


@pytest.mark.parametrize("row", cases_of(RING_ROWS))
def test_workers_are_bit_identical(row):
    first, *others = outcomes_by_rank(row, not tiers.runs_full)
    assert len(others) == row.num_workers - 1
    for other in others:
        for trial, outcomes in first.items():
            for mine, theirs in zip(outcomes, other[trial], strict=True):
                assert mine.evaluation == theirs.evaluation
                assert mine.values.keys() >= theirs.values.keys()
                for name, value in theirs.values.items():
                    assert value.tobytes() == mine.values[name].tobytes(), name
