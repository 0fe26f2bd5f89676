"""Which steps of a worker that stands still are scheduled again."""

from strategies.distribute.open_steps import OpenSteps

PATIENCE = 10.0


class Run:
    """Open steps of two workers, with a clock that the test sets."""

    def __init__(self, *steps: int):
        self.now = 0.0
        self.open = OpenSteps(PATIENCE, 2, clock=lambda: self.now)
        self.late(steps)

    def late(self, still_open) -> list[int]:
        return self.open.late(still_open, at_once=2)

    def until(self, seconds: float, *still_open: int) -> list[int]:
        """The late steps found by a look once a second, up to `seconds`, while `still_open` are open."""
        found = []
        while self.now < seconds:
            self.now += 1.0
            found += self.late(still_open)
        return found


def test_the_step_of_a_worker_that_stands_still_is_late_once_a_patience():
    run = Run(0, 1, 2, 3)
    assert run.until(1, 0, 2, 3) == [], "worker 0 has step 0"
    assert run.until(2, 0, 3) == []
    assert run.until(10, 0) == []
    assert run.until(11, 0) == [0]
    assert run.until(21, 0) == []
    assert run.until(22, 0) == [0]
    assert run.until(99, 0) == [], "as often as there are workers"
    assert run.until(100) == []


def test_a_step_that_waits_for_a_worker_is_not_late():
    run = Run(0, 1, 2, 3, 4)
    assert run.until(4, 0, 2, 3, 4) == []
    assert run.until(11, 2, 3, 4) == [], "step 2 began at 1 and step 3 at 5, at the earliest"
    assert run.until(12, 2, 3, 4) == [2]
    assert run.until(15, 2, 3, 4) == []
    assert run.until(16, 2, 3, 4) == [3]


def test_no_step_is_late_before_the_first_one_is_counted():
    assert Run(0, 1).until(99, 0, 1) == []


def test_where_steps_are_long_a_step_may_take_twice_as_long_as_others():
    run = Run(0, 1, 2)
    assert run.until(20, 0, 1, 2) == []
    assert run.until(40, 1) == []
    assert run.until(41, 1) == [1]


def test_a_late_steps_own_time_does_not_make_others_slower():
    run = Run(0, 1, 2, 3)
    run.until(1, 0, 2, 3)
    assert run.until(12, 0, 2, 3) == [0, 2]
    assert run.until(23, 3) == []
    assert run.until(24, 3) == [3]


def test_the_time_in_which_the_chief_did_not_look_does_not_count():
    """For example during an evaluation, or while TensorFlow holds Python's lock."""
    run = Run(0, 1)
    assert run.until(1, 0) == []
    run.now = 100.0
    assert run.late([0, 2]) == []
    assert run.until(106, 0, 2) == []
    assert run.until(107, 0, 2) == [0]
    run.now = 300.0
    assert run.late([3]) == []
    assert run.until(314, 3) == [], "step 2 was seen open for 7 seconds, so step 3 may take 14"
    assert run.until(315, 3) == [3]
