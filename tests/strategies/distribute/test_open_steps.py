"""Which steps of a worker that stands still are scheduled again."""

import pytest

from strategies.distribute.open_steps import OpenSteps

PATIENCE = 10.0


class Run:
    """Open steps of two workers, with a clock that the test sets."""

    def __init__(self, *steps: int):
        self.now = 0.0
        self.open = OpenSteps(PATIENCE, 2, clock=lambda: self.now)
        self.late(0.0, *steps)

    def late(self, now: float, *still_open: int) -> list[int]:
        self.now = now
        return self.open.late(still_open, at_once=2)


def test_the_step_of_a_worker_that_stands_still_is_late_once_a_patience():
    run = Run(0, 1, 2, 3)
    assert run.late(1.0, 0, 2, 3) == [], "worker 0 has step 0"
    assert run.late(2.0, 0, 3) == []
    assert run.late(3.0, 0) == []
    assert run.late(10.5, 0) == [0]
    assert run.late(20.0, 0) == []
    assert run.late(21.0, 0) == [0]
    assert run.late(99.0, 0) == [], "as often as there are workers"
    assert run.late(99.0) == []


def test_a_step_that_waits_for_a_worker_is_not_late():
    run = Run(0, 1, 2, 3, 4)
    assert run.late(4.0, 0, 2, 3, 4) == []
    assert run.late(8.0, 2, 3, 4) == [], "step 2 began at 4 and step 3 at 8, at the earliest"
    assert run.late(19.0, 2, 3, 4) == []
    assert run.late(21.0, 2, 3, 4) == [2], "step 0 took 8, so step 2 may take 16"
    assert run.late(25.0, 2, 3, 4) == [3]


def test_no_step_is_late_before_the_first_one_is_counted():
    run = Run(0, 1)
    assert run.late(1000.0, 0, 1) == []


@pytest.mark.parametrize("seconds, late", [(39.0, []), (61.0, [1])])
def test_where_steps_are_long_a_step_may_take_twice_as_long_as_others(seconds, late):
    run = Run(0, 1, 2)
    assert run.late(20.0, 1, 2) == []
    assert run.late(25.0, 1) == []
    assert run.late(seconds, 1) == late


def test_a_late_steps_own_time_does_not_make_others_slower():
    run = Run(0, 1, 2, 3)
    run.late(1.0, 0, 2, 3)
    assert run.late(50.0, 0, 2, 3) == [0, 2]
    assert run.late(51.0, 3) == []
    assert run.late(62.5, 3) == [3]
