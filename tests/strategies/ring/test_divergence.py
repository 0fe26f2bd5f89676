"""Divergence: the error names the worker whose checksums differ; without a majority it names all workers."""

import zlib

import numpy as np
import pytest

from strategies.ring.divergence import Diverged, checksums, what_drifted

STEP = 70


def drift_message(rows, names=None) -> str | None:
    """The error message for these checksums, one row for each worker; None if they raise no error."""
    found = np.array(rows, np.float64)
    workers = [f"worker:{rank}" for rank in range(len(rows))]
    try:
        what_drifted(workers, names or [f"v{index}" for index in range(found.shape[1])], found, STEP)
    except Diverged as error:
        assert "\n" not in str(error)
        return str(error)
    return None


@pytest.mark.parametrize("rows", [[[1, 2]], [[1, 2], [1, 2]], [[7]] * 5, [[]] * 2], ids=str)
def test_equal_checksums_raise_nothing(rows):
    assert drift_message(rows) is None


@pytest.mark.parametrize("other", range(3))
def test_the_worker_in_the_minority_is_named(other):
    rows = [[1, 2, 3]] * 3
    rows[other] = [1, 5, 3]
    message = drift_message(rows)
    assert message.startswith(f"worker:{other} drifted from the others: 1 of 3 variables")
    assert f"at step {STEP} (v1): " in message
    assert [rank for rank in range(3) if f"worker:{rank}" in message] == [other]


def test_several_workers_in_the_minority_are_named():
    """Each of these workers differs in a different variable."""
    message = drift_message([[8, 1], [0, 1], [0, 2], [0, 1], [0, 1]])
    assert message.startswith("worker:0, worker:2 drifted from the others: 2 of 2 variables")


@pytest.mark.parametrize(
    "rows",
    [
        [[1], [2]],
        [[1], [1], [2], [2]],
        [[1], [2], [3]],
        [[1], [1], [2], [3]],
    ],
    ids=["one against one", "two against two", "all apart", "no majority"],
)
def test_without_a_majority_all_are_named(rows):
    all_workers = " and ".join(f"worker:{rank}" for rank in range(len(rows)))
    assert drift_message(rows).startswith(f"{all_workers} differ: 1 of 1 variables")


def test_the_first_variables_are_named_and_the_others_counted():
    names = ["a", "b", "c", "d", "e"]
    three = drift_message([[1] * 5, [2, 1, 2, 1, 2]], names)
    assert "3 of 5 variables are not the same at step 70 (a, c, e): " in three
    four = drift_message([[1] * 5, [2] * 4 + [1]], names)
    assert "4 of 5 variables are not the same at step 70 (a, b, c, ...): " in four


def test_checksums_are_exact():
    contents = [bytes([number, 3]) for number in range(256)] + [b""]
    found = checksums(contents)
    assert [int(value) for value in found] == [zlib.crc32(content) for content in contents]
    assert max(found) > 2**31, "as large as they get"


def test_a_change_of_one_bit_changes_the_checksum():
    values = np.zeros(1000, np.float32)
    other = values.copy()
    other[517] = -0.0
    first, second = checksums([values.tobytes(), other.tobytes()])
    assert first != second
