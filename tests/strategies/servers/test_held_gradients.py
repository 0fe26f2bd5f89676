"""The sum of the held gradients: of the named workers, and always in the same order."""

import numpy as np
import pytest

from strategies.servers.held_gradients import HeldGradients
from strategies.servers.wire import Refused

# Their sum depends on the order of the additions.
GRADIENTS = {0: np.array([1e16, 1.0]), 1: np.array([1.0, 2.0]), 2: np.array([-1e16, 4.0])}


def held(order=(0, 1, 2), step=7) -> HeldGradients:
    found = HeldGradients()
    for worker in order:
        found.hold(step, worker, GRADIENTS[worker].copy())
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_sum_does_not_depend_on_the_order_of_arrival(order):
    assert held(order).total(7, [0, 1, 2]).tolist() == [0.0, 7.0]
    assert held(order).total(7, [0, 2, 1]).tolist() == [1.0, 7.0]


def test_the_sum_of_some_workers():
    assert held().total(7, [1]).tolist() == [1.0, 2.0]


def test_summing_changes_nothing():
    found = held()
    for _ in range(2):
        total = found.total(7, [0, 1, 2])
        assert total.tolist() == [0.0, 7.0]
        total += 1


def test_a_workers_second_gradient_replaces_its_first():
    found = held()
    found.hold(7, 1, np.array([10.0, 20.0]))
    assert found.total(7, [1]).tolist() == [10.0, 20.0]


@pytest.mark.parametrize("step, workers", [(7, [0, 3]), (8, [0])])
def test_a_gradient_that_is_not_here(step, workers):
    with pytest.raises(Refused, match=f"step {step}"):
        held().total(step, workers)


def test_drop_removes_a_step_and_earlier_ones():
    found = held()
    for step in (6, 8):
        found.hold(step, 0, np.zeros(2))
    found.drop(7)
    for step in (6, 7):
        with pytest.raises(Refused):
            found.total(step, [0])
    assert found.total(8, [0]).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_mean_is_rounded_once_in_the_gradients_own_precision(dtype):
    found, weight = HeldGradients(), 49.0
    found.hold(7, 0, np.arange(1000).astype(dtype))
    mean = found.mean(7, [0], weight)
    exact = np.arange(1000) / np.longdouble(weight)
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, exact.astype(dtype))
    by_reciprocal = np.arange(1000).astype(dtype) * dtype(1 / weight)
    assert np.any(mean != by_reciprocal), "or the test shows nothing"


def test_the_mean_of_nothing_is_zero():
    assert held().mean(7, [0, 1], 0.0).tolist() == [0.0, 0.0]
