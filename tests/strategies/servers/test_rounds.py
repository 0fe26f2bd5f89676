"""Rounds: complete with the needed gradients, no worker counts twice, and no round waits for a lost worker."""

import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.servers.rounds import Rounds
from tests.strategies.servers.at_once import LIMIT_SECONDS, TOO_LONG, Started, at_once


def rounds(needed: int, *, first: int = 0, target: int = 100) -> Rounds:
    found = Rounds(first, needed=needed)
    found.run_to(target)
    return found


def begun(found: Rounds, *workers: int) -> list[int | None]:
    """The step that each worker may compute; None for a worker that would have to wait."""
    return [found.begin(worker, 0) for worker in workers]


def give(found: Rounds, worker: int) -> list[int] | None:
    """An admitted worker's gradient for the current round."""
    assert found.admit(worker, found.done)
    return found.give(worker, found.done)


class TestWithoutBackupWorkers:
    def test_a_round_takes_each_worker_once(self):
        found = rounds(3)
        assert begun(found, 2, 0, 2, 1, 0) == [0, 0, None, 0, None]
        assert [give(found, worker) for worker in (2, 0, 1)] == [None, None, [0, 1, 2]]
        found.applied()
        assert (found.done, found.turned_away) == (1, 0)
        assert begun(found, 0, 1, 2, 1) == [1, 1, 1, None]

    def test_rounds_continue_those_of_the_resumed_run(self):
        found = rounds(1, first=7)
        assert (found.done, begun(found, 0)) == (7, [7])

    def test_no_round_before_run_to(self):
        assert begun(Rounds(0, needed=1), 0) == [None]

    def test_no_round_from_the_target_on(self):
        found = rounds(1, target=1)
        begun(found, 0)
        assert give(found, 0) == [0]
        found.applied()
        assert begun(found, 0) == [None]
        found.run_to(2)
        assert begun(found, 0) == [1]

    def test_a_second_gradient_of_a_worker_does_not_count(self):
        found = rounds(2)
        begun(found, 0, 1)
        assert give(found, 0) is None
        assert give(found, 0) is None
        assert give(found, 1) == [0, 1]
        assert give(found, 1) is None

    def test_the_missing_workers(self):
        found = rounds(3)
        begun(found, 0, 1)
        give(found, 1)
        assert found.missing(range(3)) == [0, 2]

    def test_a_gradient_of_an_earlier_round_does_not_count(self):
        found = rounds(1)
        begun(found, 0)
        give(found, 0)
        found.applied()
        assert found.give(0, 0) is None
        assert not found.admit(0, 0)


class TestBackupWorkers:
    def test_a_late_worker_is_turned_away_and_begins_the_next_round(self):
        found = rounds(2)
        assert begun(found, 0, 1, 2) == [0, 0, 0]
        assert found.admit(2, 0) and found.admit(0, 0)
        assert not found.admit(1, 0)
        assert found.turned_away == 1
        assert begun(found, 1) == [None], "the same round again"
        assert [found.give(0, 0), found.give(2, 0)] == [None, [0, 2]]
        found.applied()
        assert begun(found, 1) == [1]

    def test_a_worker_that_comes_after_the_round_is_turned_away(self):
        found = rounds(1)
        begun(found, 0, 1)
        give(found, 0)
        found.applied()
        assert not found.admit(1, 0)
        assert found.turned_away == 1
        assert begun(found, 1) == [1]

    def test_a_worker_that_asks_twice_is_admitted_once(self):
        found = rounds(2)
        begun(found, 0, 1)
        assert [found.admit(worker, 0) for worker in (0, 0, 1, 0, 2)] == [True] * 4 + [False]
        assert found.turned_away == 1

    def test_a_gradient_that_was_not_admitted_does_not_count(self):
        found = rounds(1)
        begun(found, 0, 1)
        found.admit(0, 0)
        assert found.give(1, 0) is None
        assert found.give(0, 0) == [0]


class TestLost:
    def test_a_lost_worker_may_begin_the_round_again(self):
        found = rounds(2)
        begun(found, 0, 1)
        give(found, 1)
        found.lost(0)
        assert begun(found, 0) == [0]
        assert give(found, 0) == [0, 1]

    def test_a_lost_workers_gradient_counts_if_the_servers_hold_it(self):
        found = rounds(2)
        begun(found, 0, 1)
        give(found, 0)
        found.lost(0)
        assert begun(found, 0) == [None]
        assert give(found, 1) == [0, 1]

    def test_a_worker_that_still_computes_replaces_a_lost_admitted_one(self):
        found = rounds(1)
        begun(found, 0, 1)
        found.admit(0, 0)
        found.lost(0)
        assert give(found, 1) == [1]

    def test_a_worker_that_was_turned_away_replaces_a_lost_admitted_one(self):
        found = rounds(1)
        begun(found, 0, 1)
        found.admit(0, 0)
        assert not found.admit(1, 0)
        found.lost(0)
        assert begun(found, 1) == [0]
        assert give(found, 1) == [1]

    def test_the_loss_of_a_worker_that_was_not_admitted_changes_nothing(self):
        found = rounds(1)
        begun(found, 0, 1, 2)
        found.admit(0, 0)
        assert not found.admit(2, 0)
        found.lost(1)
        assert begun(found, 2) == [None]
        assert found.give(0, 0) == [0]


class TestWaiting:
    def test_begin_waits_no_longer_than_its_time(self):
        assert rounds(1, target=0).begin(0, 0.05) is None

    @pytest.mark.parametrize("what", ["applied", "lost", "run_to"])
    def test_a_waiting_worker_is_woken_by(self, what):
        found = rounds(1, target=0 if what == "run_to" else 100)
        begun(found, 0, 1)
        found.admit(0, 0)
        found.admit(1, 0)
        waits = Started(lambda: found.begin(1, TOO_LONG))
        time.sleep(0.05)
        assert waits.is_running
        acts = {"applied": found.applied, "lost": lambda: found.lost(0), "run_to": lambda: found.run_to(9)}
        acts[what]()
        assert waits.result() == (1 if what == "applied" else 0)

    def test_wait_ends_when_enough_rounds_are_applied(self):
        found = rounds(1, target=2)
        waits = Started(lambda: found.wait(2, TOO_LONG))
        found.applied()
        assert not found.wait(2, 0.05)
        found.applied()
        assert waits.result()

    def test_a_pause_lets_the_current_round_end(self):
        found = rounds(2)
        begun(found, 0)
        give(found, 0)
        assert not found.pause(0.05)
        waits = Started(lambda: found.pause(TOO_LONG))
        assert begun(found, 1) == [0]
        assert give(found, 1) == [0, 1]
        found.applied()
        assert waits.result()
        assert begun(found, 0, 1) == [None, None]
        found.run_to(100)
        assert begun(found, 0) == [1]

    def test_a_pause_between_two_rounds(self):
        found = rounds(2)
        assert found.pause(0)
        assert begun(found, 0) == [None]

    def test_in_a_pause_no_worker_begins_a_round_whose_workers_were_all_lost(self):
        found = rounds(2)
        begun(found, 0)
        waits = Started(lambda: found.pause(TOO_LONG))
        time.sleep(0.05)
        found.lost(0)
        assert waits.result()
        assert begun(found, 0, 1) == [None, None]

    def test_the_end_wakes_all(self):
        found = rounds(2, target=5)
        begun(found, 0)
        waiting = [Started(lambda: found.begin(0, TOO_LONG)), Started(lambda: found.wait(2, TOO_LONG))]
        time.sleep(0.05)
        found.end()
        assert [one.result() for one in waiting] == [None, True]
        assert begun(found, 1) == [None]


class Run:
    """Checks that each round has the needed number of gradients, and that they were computed for it."""

    def __init__(self, needed: int, last: int):
        self.rounds, self.needed, self.last = rounds(needed, target=last), needed, last
        self.complete: list[list[int]] = []
        self.given: dict[int, list[int]] = {}

    def give(self, worker: int, step: int) -> None:
        self.given.setdefault(step, []).append(worker)
        found = self.rounds.give(worker, step)
        if found is not None:
            assert step == self.rounds.done
            assert found == sorted(self.given[step])
            self.complete.append(found)
            self.rounds.applied()

    def check_end(self) -> None:
        assert self.rounds.done == len(self.complete) == self.last
        assert all(len(set(workers)) == self.needed for workers in self.complete)
        assert all(len(workers) == self.needed for workers in self.given.values())


@given(
    needed=st.integers(1, 4),
    backups=st.integers(0, 2),
    events=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["continues", "continues", "continues", "is lost"]))
    ),
)
def test_events_in_any_order(needed, backups, events):
    """A worker begins, then asks to be admitted, then gives its gradient."""
    run, computing, admitted = Run(needed, last=6), {}, {}
    events = [(worker % (needed + backups), what) for worker, what in events]
    # At the end all workers continue, in turn.
    events += [(worker, "continues") for worker in range(needed + backups)] * 50
    turned_away = 0
    for worker, what in events:
        if what == "is lost":
            computing.pop(worker, None)
            admitted.pop(worker, None)
            run.rounds.lost(worker)
        elif worker in admitted:
            run.give(worker, admitted.pop(worker))
        elif worker in computing:
            step = computing.pop(worker)
            if run.rounds.admit(worker, step):
                admitted[worker] = step
            else:
                turned_away += 1
        elif (step := run.rounds.begin(worker, 0)) is not None:
            computing[worker] = step
    run.check_end()
    assert run.rounds.turned_away == turned_away
    assert backups or not turned_away


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backups", [0, 1, 2])
def test_concurrent_workers_of_different_speeds(backups, seed):
    """With probability 0.1 a worker is lost before it is admitted, and again after it; it returns."""
    run, lock = Run(4 - backups, last=30), threading.Lock()

    def work(rank: int) -> None:
        draw = random.Random(f"{seed} {rank}")
        while (step := run.rounds.begin(rank, LIMIT_SECONDS)) is not None:
            time.sleep(draw.random() * 0.001 * 2**rank)
            if draw.random() < 0.1:
                run.rounds.lost(rank)
            elif run.rounds.admit(rank, step):
                if draw.random() < 0.1:
                    run.rounds.lost(rank)
                    continue
                with lock:
                    run.give(rank, step)

    def lead() -> None:
        assert run.rounds.wait(30, LIMIT_SECONDS)
        run.rounds.end()

    at_once(lead, *[lambda rank=rank: work(rank) for rank in range(4)])
    run.check_end()
    assert (run.rounds.turned_away > 0) == (backups > 0)
