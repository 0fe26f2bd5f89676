"""The sum of the held gradients contains those of the named leases, always added in the same order."""

import numpy as np
import pytest

from strategies.servers.own.steps.held_gradients import HeldGradients
from strategies.servers.own.steps.piece_gradient import PieceGradient
from strategies.servers.wire import Refused

# Their sum depends on the order of the additions.
GRADIENTS = {0: np.array([1e16, 1.0]), 1: np.array([1.0, 2.0]), 2: np.array([-1e16, 4.0])}


def held(order=(0, 1, 2), step=7) -> HeldGradients:
    found = HeldGradients()
    for lease in order:
        found.hold(step, lease, PieceGradient(GRADIENTS[lease].copy()))
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_sum_does_not_depend_on_the_order_of_arrival(order):
    assert held(order).total(7, [0, 1, 2]).vector.tolist() == [0.0, 7.0]
    assert held(order).total(7, [0, 2, 1]).vector.tolist() == [1.0, 7.0]


def test_the_sum_of_some_leases():
    assert held().total(7, [1]).vector.tolist() == [1.0, 2.0]


def test_summing_changes_nothing():
    found = held()
    for _ in range(2):
        total = found.total(7, [0, 1, 2]).vector
        assert total.tolist() == [0.0, 7.0]
        total += 1


def test_a_leases_second_gradient_replaces_its_first():
    found = held()
    found.hold(7, 1, PieceGradient(np.array([10.0, 20.0])))
    assert found.total(7, [1]).vector.tolist() == [10.0, 20.0]


@pytest.mark.parametrize("step, leases", [(7, [0, 3]), (8, [0])])
def test_a_gradient_that_is_not_here(step, leases):
    with pytest.raises(Refused, match=f"step {step}"):
        held().total(step, leases)


def test_drop_removes_a_step_and_earlier_ones():
    found = held()
    for step in (6, 8):
        found.hold(step, 0, PieceGradient(np.zeros(2)))
    found.drop(7)
    for step in (6, 7):
        with pytest.raises(Refused):
            found.total(step, [0])
    assert found.total(8, [0]).vector.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_mean_is_rounded_once_in_the_gradients_own_precision(dtype):
    found, weight = HeldGradients(), 49.0
    found.hold(7, 0, PieceGradient(np.arange(1000).astype(dtype)))
    mean = found.mean(7, [0], weight).vector
    exact = np.arange(1000) / np.longdouble(weight)
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, exact.astype(dtype))
    by_reciprocal = np.arange(1000).astype(dtype) * dtype(1 / weight)
    assert np.any(mean != by_reciprocal), "or the test shows nothing"


def test_the_mean_of_nothing_is_zero():
    assert held().mean(7, [0, 1], 0.0).vector.tolist() == [0.0, 0.0]


def test_rows_of_tables_are_added_by_row():
    """The workers used different rows of a table with 4 rows of 2 numbers."""
    found, first, second = HeldGradients(), np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[10.0, 20.0]])
    found.hold(7, 0, PieceGradient(np.zeros(1), [(np.array([3, 1]), first)]))
    found.hold(7, 1, PieceGradient(np.zeros(1), [(np.array([3]), second)]))
    total = found.total(7, [0, 1])
    [(ids, values)] = total.rows
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {1: [3.0, 4.0], 3: [11.0, 22.0]}
    assert total.square == 9 + 16 + 121 + 484
    assert found.mean(7, [0, 1], 2.0).rows[0][1].tolist() == (values / 2).tolist()
