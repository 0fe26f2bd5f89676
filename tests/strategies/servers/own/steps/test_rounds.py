"""Rounds are complete with the needed gradients, count no part twice, and don't wait for a lost worker."""

import itertools
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.servers.own.steps.presence import Presence
from strategies.servers.own.steps.rounds import Lease, Rounds
from tests.strategies.servers.at_once import LIMIT_SECONDS, TOO_LONG, Started, at_once
from tests.tiers import first_quick

# Patience in seconds that is over at the next look.
NONE = 0.0


class Group:
    """The rounds of some workers, each of which has at most one lease.

    Attributes:
      rounds: the rounds.
    """

    def __init__(self, needed: int, workers: int | None = None, *, first: int = 0, target: int = 100, **more):
        self.rounds = Rounds(first, num_workers=workers or needed, needed=needed, **more)
        self.rounds.run_to(target)
        self._leases: dict[int, Lease] = {}

    def began(self, *workers: int) -> list[int | None]:
        """The step that each worker may compute; None for a worker that would have to wait."""
        return [None if (lease := self.lease(worker)) is None else lease.step for worker in workers]

    def parts(self, *workers: int) -> list[int | None]:
        """The part that each worker may compute; None for a worker that would have to wait."""
        return [None if (lease := self.lease(worker)) is None else lease.part for worker in workers]

    def lease(self, worker: int, seconds: float = 0) -> Lease | None:
        found = self.rounds.begin(worker, seconds)
        if found is not None:
            self._leases[worker] = found
        return found

    def admitted(self, *workers: int) -> list[bool]:
        return [self.rounds.admit(self._leases[worker].number) for worker in workers]

    def gave(self, worker: int) -> list[int] | None:
        """Gives an admitted worker's gradient; returns the workers whose gradients complete the round, or None."""
        found = self.rounds.give(self._leases[worker].number)
        return None if found is None else [lease.worker for lease in found]

    def give(self, *workers: int) -> list[int] | None:
        """Admits workers and gives their gradients, which the round must take; returns the last one's `gave`."""
        for worker in workers:
            assert self.admitted(worker) == [True]
            found = self.gave(worker)
        return found

    def apply(self, *workers: int) -> list[int]:
        """Completes the round with the gradients of these workers, and ends it."""
        found = self.give(*workers)
        assert found is not None
        self.rounds.applied()
        return found


class TestWithoutBackupWorkers:
    def test_a_round_takes_each_worker_once(self):
        group = Group(3)
        assert group.began(2, 0, 2, 1, 0) == [0, 0, None, 0, None]
        assert [group.give(worker) for worker in (2, 0, 1)] == [None, None, [0, 1, 2]]
        group.rounds.applied()
        assert (group.rounds.done, group.rounds.turned_away) == (1, 0)
        assert group.began(0, 1, 2, 1) == [1, 1, 1, None]

    def test_each_worker_gets_its_own_part(self):
        assert Group(3).parts(2, 0, 1) == [2, 0, 1]

    def test_rounds_continue_those_of_the_resumed_run(self):
        group = Group(1, first=7)
        assert (group.rounds.done, group.began(0)) == (7, [7])

    def test_no_round_before_run_to(self):
        assert Group(1, target=0).began(0) == [None]

    def test_no_round_from_the_target_on(self):
        group = Group(1, target=1)
        group.began(0)
        assert group.apply(0) == [0]
        assert group.began(0) == [None]
        group.rounds.run_to(2)
        assert group.began(0) == [1]

    def test_a_second_gradient_of_a_lease_does_not_count(self):
        group = Group(2)
        group.began(0, 1)
        assert group.give(0) is None
        assert group.gave(0) is None
        assert group.give(1) == [0, 1]
        assert group.gave(1) is None

    def test_the_missing_workers(self):
        group = Group(3)
        group.began(0, 1)
        group.give(1)
        assert group.rounds.missing(range(3)) == [0, 2]

    def test_a_gradient_of_an_earlier_round_does_not_count(self):
        group = Group(2)
        group.began(0, 1)
        group.apply(0, 1)
        assert group.gave(0) is None
        assert group.admitted(0) == [False]

    def test_no_two_leases_have_one_number(self):
        """Not even if one is of an earlier start, whose gradient may still be on its way."""
        numbers = itertools.count()
        found = [Group(2, numbers=numbers).lease(worker).number for worker in (0, 1)]
        assert found == [0, 1]


class TestBackupWorkers:
    def test_a_late_worker_is_turned_away_and_begins_the_next_round(self):
        group = Group(2, 3)
        assert group.began(0, 1, 2) == [0, 0, 0]
        assert group.admitted(2, 0, 1) == [True, True, False]
        assert group.rounds.turned_away == 1
        assert group.began(1) == [None], "the same round again"
        assert [group.gave(0), group.gave(2)] == [None, [0, 2]]
        group.rounds.applied()
        assert group.began(1) == [1]

    def test_a_worker_that_comes_after_the_round_is_turned_away(self):
        group = Group(1, 2)
        group.began(0, 1)
        group.apply(0)
        assert group.admitted(1) == [False]
        assert group.rounds.turned_away == 1
        assert group.began(1) == [1]

    def test_a_worker_that_asks_twice_is_admitted_once(self):
        group = Group(2, 3)
        group.began(0, 1, 2)
        assert group.admitted(0, 0, 1, 0, 2) == [True] * 4 + [False]
        assert group.rounds.turned_away == 1

    def test_a_gradient_that_was_not_admitted_does_not_count(self):
        group = Group(1, 2)
        group.began(0, 1)
        group.admitted(0)
        assert group.gave(1) is None
        assert group.gave(0) == [0]

    def test_nobody_takes_over_a_part_that_the_round_does_not_need(self):
        group = Group(2, 3)
        group.began(0, 1, 2)
        group.rounds.lost(1)
        group.give(0)
        assert group.began(0) == [None]
        assert group.give(2) == [0, 2]

    def test_a_part_is_taken_over_if_more_are_lost_than_there_are_backups(self):
        group = Group(2, 3)
        group.began(0, 1, 2)
        group.rounds.lost(1)
        group.rounds.lost(2)
        group.give(0)
        assert group.parts(0) == [1]
        assert group.give(0) == [0, 0]


class TestLost:
    def test_another_worker_computes_the_part_of_a_lost_one(self):
        group = Group(3)
        group.began(0, 1, 2)
        group.give(0, 2)
        assert group.parts(0) == [None], "worker 1 is in time"
        group.rounds.lost(1)
        lease = group.lease(0)
        assert (lease.step, lease.part, lease.worker, lease.replaces) == (0, 1, 0, 1)
        assert group.parts(2) == [None], "one is enough"
        assert group.give(0) == [0, 0, 2], "by part"

    def test_a_lost_worker_may_begin_the_round_again(self):
        group = Group(2)
        group.began(0, 1)
        group.give(1)
        group.rounds.lost(0)
        assert group.began(0) == [0]
        assert group.parts(1) == [None]
        assert group.give(0) == [0, 1]

    def test_a_lost_workers_gradient_counts_if_the_servers_hold_it(self):
        group = Group(2)
        group.began(0, 1)
        group.give(0)
        group.rounds.lost(0)
        assert group.began(0) == [None]
        assert group.give(1) == [0, 1]

    def test_a_gradient_of_a_lost_worker_that_arrives_after_its_loss_does_not_count(self):
        group = Group(2)
        group.began(0, 1)
        group.admitted(0)
        group.rounds.lost(0)
        assert group.gave(0) is None
        assert group.admitted(0) == [False]

    def test_one_worker_is_left_and_computes_all_parts(self):
        group = Group(3)
        group.began(0, 1, 2)
        group.rounds.lost(0)
        group.rounds.lost(2)
        group.give(1)
        for part in (0, 2):
            assert group.parts(1) == [part]
            complete = group.give(1)
        assert complete == [1, 1, 1]

    def test_a_worker_that_returns_takes_its_part_of_the_next_round(self):
        group = Group(2)
        group.began(0, 1)
        group.rounds.lost(1)
        group.give(0)
        assert group.parts(0) == [1]
        assert group.parts(1) == [None], "its part of this round is computed already"
        group.apply(0)
        assert group.rounds.away == set()
        assert group.parts(0, 1) == [0, 1]

    def test_whoever_took_over_may_be_lost_too(self):
        group = Group(3)
        group.began(0, 1, 2)
        group.give(0, 2)
        group.rounds.lost(1)
        assert group.parts(0) == [1]
        group.rounds.lost(0)
        assert group.parts(2) == [1]
        assert group.give(2) == [0, 2, 2], "worker 0 had given its own part"
        group.rounds.applied()
        assert group.parts(2) == [2]
        group.give(2)
        assert group.parts(2) == [0]

    def test_a_loss_is_remembered_by_the_next_start(self):
        group = Group(2, lost={1})
        assert group.parts(0) == [0]
        group.give(0)
        assert group.parts(0) == [1]

    def test_a_worker_that_has_not_come_yet_is_waited_for(self):
        group = Group(2, patience_seconds=NONE)
        group.began(0)
        group.give(0)
        assert group.parts(0) == [None]
        assert group.parts(1) == [1]

    def test_a_worker_that_still_computes_replaces_a_lost_admitted_one(self):
        group = Group(1, 2)
        group.began(0, 1)
        group.admitted(0)
        group.rounds.lost(0)
        assert group.give(1) == [1]

    def test_a_worker_that_was_turned_away_replaces_a_lost_admitted_one(self):
        group = Group(1, 2)
        group.began(0, 1)
        assert group.admitted(0, 1) == [True, False]
        group.rounds.lost(0)
        assert group.parts(1) == [1]
        assert group.give(1) == [1]

    def test_the_loss_of_a_worker_that_was_not_admitted_changes_nothing(self):
        group = Group(1, 3)
        group.began(0, 1, 2)
        assert group.admitted(0, 2) == [True, False]
        group.rounds.lost(1)
        assert group.began(2) == [None]
        assert group.gave(0) == [0]


class TestLate:
    def late(self, *, patience_seconds: float = NONE) -> Group:
        """A group in which worker 1 has a lease and gives nothing; worker 0 has given its part."""
        group = Group(2, patience_seconds=patience_seconds)
        group.began(0, 1)
        group.give(0)
        return group

    def test_another_worker_computes_the_part_of_a_late_one(self):
        group = self.late()
        time.sleep(0.01)
        lease = group.lease(0)
        assert (lease.part, lease.replaces, group.rounds.away) == (1, 1, {1})

    def test_a_worker_that_waits_gets_the_part_when_it_is_late(self):
        group = self.late(patience_seconds=0.1)
        assert group.parts(0) == [None]
        began = time.monotonic()
        assert group.lease(0, seconds=TOO_LONG).part == 1
        assert time.monotonic() - began < 5.0

    def test_the_first_gradient_of_a_part_counts_and_the_second_is_refused(self):
        group = self.late()
        time.sleep(0.01)
        group.parts(0)
        assert group.give(0) == [0, 0]
        assert group.admitted(1) == [False]
        assert group.gave(1) is None
        assert group.rounds.turned_away == 1

    def test_a_late_gradient_counts_if_it_is_the_first(self):
        group = self.late()
        time.sleep(0.01)
        group.parts(0)
        assert group.give(1) == [0, 1]
        group.rounds.applied()
        assert group.admitted(0) == [False]
        assert group.parts(0, 1) == [0, 1]

    def test_a_part_that_nobody_begins_is_late_too(self):
        """A worker may stand still between two rounds."""
        group = Group(2, patience_seconds=NONE)
        group.began(0, 1)
        group.apply(0, 1)
        group.give(*group.parts(0))
        time.sleep(0.01)
        assert group.parts(0) == [1]

    def test_a_late_worker_is_not_waited_for_again(self):
        group = self.late(patience_seconds=0.2)
        assert group.lease(0, seconds=0.3).part == 1
        group.apply(0)
        assert group.parts(0) == [0]
        group.give(0)
        assert group.parts(0) == [1], "at once"
        group.apply(0)
        assert group.parts(1, 0) == [1, 0], "it has returned"
        group.give(0)
        assert group.parts(0) == [None], "and is in time again"

    def test_a_worker_has_twice_as_long_as_the_slowest_of_the_others(self):
        group = Group(2, patience_seconds=NONE)
        assert group.parts(0) == [0]
        time.sleep(0.2)
        assert group.parts(1) == [1]
        group.give(0)
        assert group.parts(0) == [None]

    def test_a_late_worker_counts_once_until_it_returns(self):
        """Server 0 counts after it has issued the lease; the late worker may then already be asking again."""
        presence, group = Presence(), Group(2, patience_seconds=NONE)
        presence.returned(1)

        def counted(lease: Lease) -> bool | None:
            return presence.replace(lease.replaces, is_first=lease.is_first)

        group.began(0, 1)
        group.give(0)
        time.sleep(0.01)
        assert counted(group.lease(0)) is True
        group.give(0)
        group.rounds.applied()
        assert group.began(0) == [1]
        group.give(0)
        lease = group.lease(0)
        assert lease.replaces == 1
        assert presence.returned(1)
        assert counted(lease) is None

    def test_whoever_took_over_may_be_late_too(self):
        group = Group(3, patience_seconds=NONE)
        group.began(0, 1, 2)
        group.give(0, 2)
        time.sleep(0.01)
        assert group.lease(0).replaces == 1
        time.sleep(0.01)
        lease = group.lease(2)
        assert (lease.part, lease.replaces, group.rounds.away) == (1, 0, {0, 1})
        assert group.give(2) == [0, 2, 2]


class TestWaiting:
    def test_begin_waits_no_longer_than_its_time(self):
        assert Group(1, target=0).lease(0, 0.05) is None

    @pytest.mark.parametrize("what", ["applied", "lost", "run_to"])
    def test_a_waiting_worker_is_woken_by(self, what):
        group = Group(1, 2, target=0 if what == "run_to" else 100)
        if what != "run_to":
            group.began(0, 1)
            group.admitted(0, 1)
        waits = Started(lambda: group.lease(1, TOO_LONG))
        time.sleep(0.05)
        assert waits.is_running
        rounds = group.rounds
        {"applied": rounds.applied, "lost": lambda: rounds.lost(0), "run_to": lambda: rounds.run_to(9)}[what]()
        assert waits.result().step == (1 if what == "applied" else 0)

    def test_wait_ends_when_enough_rounds_are_applied(self):
        found = Group(1, target=2).rounds
        waits = Started(lambda: found.wait(2, TOO_LONG))
        found.applied()
        assert not found.wait(2, 0.05)
        found.applied()
        assert waits.result()

    def test_a_pause_lets_the_current_round_end(self):
        group = Group(2)
        group.began(0)
        group.give(0)
        assert not group.rounds.pause(0.05)
        waits = Started(lambda: group.rounds.pause(TOO_LONG))
        assert group.began(1) == [0]
        assert group.apply(1) == [0, 1]
        assert waits.result()
        assert group.began(0, 1) == [None, None]
        group.rounds.run_to(100)
        assert group.began(0) == [1]

    def test_in_a_pause_the_part_of_a_lost_worker_is_taken_over(self):
        group = Group(2)
        group.began(0, 1)
        group.give(0)
        waits = Started(lambda: group.rounds.pause(TOO_LONG))
        time.sleep(0.05)
        group.rounds.lost(1)
        assert group.parts(0) == [1]
        assert group.apply(0) == [0, 0]
        assert waits.result()
        assert group.began(0) == [None]

    def test_a_pause_between_two_rounds(self):
        group = Group(2)
        assert group.rounds.pause(0)
        assert group.began(0) == [None]

    def test_in_a_pause_no_worker_begins_a_round_whose_workers_were_all_lost(self):
        group = Group(2)
        group.began(0)
        waits = Started(lambda: group.rounds.pause(TOO_LONG))
        time.sleep(0.05)
        group.rounds.lost(0)
        assert waits.result()
        assert group.began(0, 1) == [None, None]

    def test_a_pause_does_not_wait_for_a_round_that_no_worker_is_left_to_end(self):
        """The given part is kept: workers that return compute only the rest."""
        group = Group(2)
        group.began(0)
        group.give(0)
        group.rounds.lost(0)
        group.rounds.lost(1)
        assert group.rounds.pause(0)
        assert group.began(0, 1) == [None, None]
        group.rounds.run_to(100)
        assert group.parts(0, 1) == [None, 1]
        assert group.apply(1) == [0, 1]

    def test_a_pause_waits_for_the_update_of_a_round_whose_workers_were_then_lost(self):
        group = Group(2)
        group.began(0, 1)
        group.give(0)
        assert group.give(1) == [0, 1]
        group.rounds.lost(0)
        group.rounds.lost(1)
        assert not group.rounds.pause(0.05)
        group.rounds.applied()
        assert group.rounds.pause(0)

    def test_the_end_wakes_all(self):
        group = Group(2, target=5)
        group.began(0)
        waiting = [Started(lambda: group.lease(0, TOO_LONG)), Started(lambda: group.rounds.wait(2, TOO_LONG))]
        time.sleep(0.05)
        group.rounds.end()
        assert [one.result() for one in waiting] == [None, True]
        assert group.began(1) == [None]


class Run:
    """Checks that each round has the needed number of parts, each once, and that they were computed for it."""

    def __init__(self, needed: int, workers: int, last: int, **more):
        self.rounds = Rounds(0, num_workers=workers, needed=needed, **more)
        self.rounds.run_to(last)
        self.needed, self.last = needed, last
        self.complete: list[list[Lease]] = []
        self.given: dict[int, list[int]] = {}

    def give(self, lease: Lease) -> None:
        found = self.rounds.give(lease.number)
        if found is not None:
            assert lease.step == self.rounds.done
            assert lease in found
            self.complete.append(found)
            self.rounds.applied()

    def check_end(self) -> None:
        assert self.rounds.done == len(self.complete) == self.last
        for step, leases in enumerate(self.complete):
            parts = [lease.part for lease in leases]
            assert parts == sorted(set(parts)), "each part once, in order"
            assert len(parts) == self.needed
            assert {lease.step for lease in leases} == {step}


@given(
    needed=st.integers(1, 4),
    backups=st.integers(0, 2),
    is_hasty=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["continues", "continues", "continues", "is lost"]))
    ),
    survivor=st.integers(0, 5),
)
def test_events_in_any_order(needed, backups, is_hasty, events, survivor):
    """A worker begins, then asks to be admitted, then gives its gradient. At the end one worker is left."""
    workers = needed + backups
    run = Run(needed, workers, last=6, patience_seconds=NONE if is_hasty else TOO_LONG)
    computing, admitted = {}, {}
    turned_away = 0

    def act(worker, what):
        nonlocal turned_away
        if what == "is lost":
            computing.pop(worker, None)
            admitted.pop(worker, None)
            run.rounds.lost(worker)
        elif worker in admitted:
            run.give(admitted.pop(worker))
        elif worker in computing:
            lease = computing.pop(worker)
            if run.rounds.admit(lease.number):
                admitted[worker] = lease
            else:
                turned_away += 1
        elif (lease := run.rounds.begin(worker, 0)) is not None:
            computing[worker] = lease

    for worker, what in events:
        act(worker % workers, what)
    for worker in range(workers):
        if worker != survivor % workers:
            act(worker, "is lost")
    for _ in range(3 * 6 * workers):
        act(survivor % workers, "continues")
    run.check_end()
    assert run.rounds.turned_away == turned_away
    assert backups or is_hasty or not turned_away


@pytest.mark.parametrize(
    "patience_seconds, all_return", [(TOO_LONG, True), (0.001, False)], ids=["they return", "late or gone"]
)
@pytest.mark.parametrize("seed", first_quick(range(3)))
@pytest.mark.parametrize("backups", [0, 1, 2])
def test_concurrent_workers_of_different_speeds(backups, seed, patience_seconds, all_return):
    """With probability 0.1 a worker is lost before it is admitted, and again after it."""
    run, lock = Run(4 - backups, 4, last=30, patience_seconds=patience_seconds), threading.Lock()

    def work(rank: int) -> None:
        draw = random.Random(f"{seed} {rank}")

        def is_lost() -> bool:
            lost = draw.random() < 0.1
            if lost:
                run.rounds.lost(rank)
            return lost

        while not run.rounds.wait(30, 0):
            lease = run.rounds.begin(rank, 0.01)
            if lease is None:
                continue
            time.sleep(draw.random() * 0.001 * 2**rank)
            if is_lost():
                if rank == 3 and not all_return:
                    return
            elif run.rounds.admit(lease.number) and not is_lost():
                with lock:
                    run.give(lease)

    def lead() -> None:
        assert run.rounds.wait(30, LIMIT_SECONDS)
        run.rounds.end()

    at_once(lead, *[lambda rank=rank: work(rank) for rank in range(4)])
    run.check_end()
    if all_return:
        assert (run.rounds.turned_away > 0) == (backups > 0)
