"""Tickets: each is used once even if workers are lost, and no update exceeds the staleness bound."""

import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.servers.own.steps.admission import Admission, Ticket
from tests.strategies.servers.at_once import LIMIT_SECONDS, TOO_LONG, Started, at_once
from tests.tiers import first_quick


def admission(bound: int | None = None, *, first: int = 0, num_workers: int = 3, target: int = 100) -> Admission:
    found = Admission(first, bound=bound, num_workers=num_workers)
    found.run_to(target)
    return found


def steps(found: Admission, *workers: int) -> list[int | None]:
    """The step of each worker's next ticket, in turn; None for a worker that would have to wait."""
    tickets = [found.begin(worker, 0) for worker in workers]
    return [None if ticket is None else ticket.step for ticket in tickets]


class TestSteps:
    def test_they_ascend(self):
        assert steps(admission(), 0, 2, 2, 1, 0) == [0, 1, 2, 3, 4]

    def test_they_continue_those_of_the_resumed_run(self):
        found = admission(first=7)
        assert found.done == 7
        assert found.begin(1, 0) == Ticket(7, 1, 7, 0)

    def test_a_ticket_holds_the_number_of_done_steps(self):
        found = admission()
        first = found.begin(0, 0)
        assert found.begin(1, 0).done == 0
        assert found.use(first)
        assert found.begin(1, 0).done == found.done == 1

    def test_no_ticket_before_run_to(self):
        assert Admission(0, bound=None, num_workers=1).begin(0, 0) is None

    def test_no_ticket_from_the_target_on(self):
        found = admission(target=2)
        assert steps(found, 0, 1, 2) == [0, 1, None]
        found.run_to(3)
        assert steps(found, 2, 0) == [2, None]

    def test_a_ticket_can_be_used_once(self):
        found = admission()
        ticket = found.begin(0, 0)
        assert found.use(ticket)
        assert not found.use(ticket)
        assert found.done == 1

    def test_a_ticket_of_an_earlier_run_is_refused(self):
        assert not admission(first=5).use(Ticket(5, 0, 5, 0))


class TestBounds:
    def test_without_a_bound_no_worker_waits(self):
        assert None not in steps(admission(), *[0] * 50)

    def test_bound_1(self):
        """Two tickets may be open at once: one of the two updates then has staleness 1, the largest allowed."""
        found = admission(1)
        first, second = found.begin(0, 0), found.begin(1, 0)
        assert found.begin(2, 0) is None
        found.use(first)
        # The second ticket's staleness is 1 already; another ticket could make it 2.
        assert found.begin(2, 0) is None
        found.use(second)
        assert steps(found, 2, 0, 1) == [2, 3, None]

    def test_bound_2_with_a_slow_worker(self):
        """Others use two tickets while the slow worker computes, and then wait for that worker."""
        found = admission(2)
        slow = found.begin(0, 0)
        for _ in range(2):
            assert found.use(found.begin(1, 0))
        assert steps(found, 1, 2) == [None, None]
        found.use(slow)
        assert steps(found, 1, 2) == [3, 4]

    def test_bound_0_makes_workers_take_turns(self):
        found = admission(0)
        for step in range(7):
            others = [worker for worker in range(3) if worker != step % 3]
            assert steps(found, *others) == [None, None]
            ticket = found.begin(step % 3, 0)
            assert ticket.step == step
            assert steps(found, 0, 1, 2) == [None] * 3
            found.use(ticket)

    def test_bound_0_continues_the_turns_of_the_resumed_run(self):
        assert steps(admission(0, first=7), 0, 2, 1) == [None, None, 7]


class TestLost:
    def test_the_steps_of_a_lost_worker_go_to_others_lowest_first(self):
        found = admission()
        tickets = [found.begin(worker, 0) for worker in (1, 0, 1, 2)]
        found.lost(1)
        assert [found.use(ticket) for ticket in tickets] == [False, True, False, True]
        assert steps(found, 0, 2, 2) == [0, 2, 4]
        assert [found.use(ticket) for ticket in tickets] == [False] * 4

    def test_a_step_that_is_issued_again_has_another_lease(self):
        """Also for the same worker, which may have restarted: its earlier process may still compute."""
        found = admission()
        before = found.begin(0, 0)
        found.lost(0)
        again = found.begin(0, 0)
        assert (again.step, again.done) == (before.step, before.done)
        assert not found.is_open(before) and found.is_open(again)

    def test_no_lease_below_open_from_can_be_used(self):
        found = admission()
        tickets = [found.begin(worker, 0) for worker in (0, 1, 2)]
        assert found.open_from() == tickets[0].lease
        found.use(tickets[1])
        found.lost(0)
        assert found.open_from() == tickets[2].lease
        found.use(tickets[2])
        assert found.open_from() == found.begin(0, 0).lease

    def test_the_updates_of_a_lost_worker_count(self):
        found = admission()
        found.use(found.begin(1, 0))
        found.lost(1)
        assert found.done == 1
        assert steps(found, 0) == [1]

    def test_no_worker_waits_for_a_lost_one(self):
        found = admission(1)
        found.use([found.begin(worker, 0) for worker in (0, 1)][1])
        assert found.begin(2, 0) is None
        found.lost(0)
        assert steps(found, 2) == [0]

    def test_bound_0_gives_a_lost_workers_turns_to_others_until_it_returns(self):
        found = admission(0, num_workers=2)
        found.begin(0, 0)
        found.lost(0)
        for step in range(3):
            ticket = found.begin(1, 0)
            assert ticket.step == step
            found.use(ticket)
        assert steps(found, 0) == [None]
        found.use(found.begin(1, 0))
        assert steps(found, 1, 0) == [None, 4]


class TestBatches:
    def test_each_worker_has_its_own(self):
        found = admission(num_workers=2, first=5)
        assert [found.begin(worker, 0).batch for worker in (0, 1, 1, 1, 0)] == [6, 5, 7, 9, 8]

    def test_a_worker_that_starts_again_continues_where_it_was(self):
        found = admission(num_workers=2)
        for _ in range(3):
            found.use(found.begin(0, 0))
        unused = [found.begin(0, 0).batch for _ in range(2)]
        found.lost(0)
        assert found.begin(1, 0).batch == 1, "the step of the lost one, with a batch of its own"
        assert [found.begin(0, 0).batch for _ in range(3)] == [*unused, 10] == [6, 8, 10]

    def test_the_next_worker_computes_those_of_one_that_does_not_come_back(self):
        found = Admission(0, bound=None, num_workers=3, patience_seconds=0)
        found.run_to(100)
        assert [found.begin(worker, 0).batch for worker in (0, 1, 2, 1)] == [0, 1, 2, 4]
        found.lost(1)
        after = [found.begin(worker, 0) for worker in (0, 2, 2, 2, 2, 0)]
        assert [ticket.batch for ticket in after] == [3, 1, 4, 5, 7, 6]
        assert [found.replaced(ticket.step) for ticket in after] == [None, 1, 1, None, 1, None]
        assert found.begin(1, 0).batch == 10, "it is back"
        assert found.begin(2, 0).batch == 8

    def test_those_of_a_worker_that_comes_back_in_time_wait_for_it(self):
        found = Admission(0, bound=None, num_workers=2, patience_seconds=60)
        found.run_to(100)
        assert [found.begin(worker, 0).batch for worker in (0, 0, 0)] == [0, 2, 4], "worker 1 is not there yet"
        found.lost(0)
        assert [found.begin(worker, 0).batch for worker in (1, 1, 0)] == [1, 3, 0]

    def test_a_resumed_run_continues_where_it_was(self):
        found = Admission(7, bound=None, num_workers=2, positions=[12, 3])
        found.run_to(100)
        assert [found.begin(worker, 0).batch for worker in (0, 1, 0)] == [12, 3, 14]
        assert found.positions() == [16, 5]

    def test_bound_0_computes_each_step_on_its_own_batch_whoever_is_lost(self):
        """The worker after a lost one takes all of its turns, and so reads the lost worker's batches in order."""
        found, workers = admission(0, num_workers=3), []
        assert steps(found, 0, 1, 2) == [0, None, None]
        found.lost(0)
        for step in range(6):
            (ticket,) = filter(None, [found.begin(worker, 0) for worker in (2, 1)])
            assert (ticket.step, ticket.batch) == (step, step)
            workers.append(ticket.worker)
            found.use(ticket)
        assert workers == [1, 1, 2, 1, 1, 2]
        assert found.positions() is None


class TestWaiting:
    def test_begin_waits_no_longer_than_its_time(self):
        assert admission(target=0).begin(0, 0.05) is None

    @pytest.mark.parametrize("what", ["use", "lost", "run_to"])
    def test_a_waiting_worker_is_woken_by(self, what):
        found = admission(0, num_workers=2, target=3 if what == "run_to" else 100)
        for step in range(3):
            ticket = found.begin(step % 2, 0)
            if what == "run_to" or step < 2:
                found.use(ticket)
        waits = Started(lambda: found.begin(1, TOO_LONG))
        time.sleep(0.05)
        assert waits.is_running
        acts = {"use": lambda: found.use(ticket), "lost": lambda: found.lost(0), "run_to": lambda: found.run_to(9)}
        acts[what]()
        assert waits.result().step == (2 if what == "lost" else 3)

    def test_a_worker_with_an_open_ticket_does_not_wait(self):
        """A waiting worker could not use the ticket for which others wait."""
        found = admission(bound=1)
        held = found.begin(0, TOO_LONG)
        assert found.begin(0, TOO_LONG).step == 1
        assert at_once(lambda: found.begin(0, TOO_LONG)) == [None]
        assert found.use(held)

    def test_wait_ends_when_enough_tickets_are_used(self):
        found = admission(target=2)
        tickets = [found.begin(0, 0), found.begin(1, 0)]
        waits = Started(lambda: found.wait(2, TOO_LONG))
        found.use(tickets[1])
        assert not found.wait(2, 0.05)
        found.use(tickets[0])
        assert waits.result()

    def test_a_pause_waits_for_open_tickets(self):
        found = admission()
        tickets = [found.begin(worker, 0) for worker in (0, 1)]
        found.use(tickets[0])
        assert not found.pause(0.05)
        assert steps(found, 0) == [None]
        waits = Started(lambda: found.pause(TOO_LONG))
        found.use(tickets[1])
        assert waits.result()
        assert steps(found, 0) == [None]
        found.run_to(100)
        assert steps(found, 0) == [2]

    def test_a_pause_does_not_wait_for_a_lost_worker(self):
        found = admission()
        found.begin(0, 0)
        found.lost(0)
        assert found.pause(0)
        assert steps(found, 1) == [None]

    def test_the_end_wakes_all(self):
        found = admission(0, target=5)
        found.begin(0, 0)
        waiting = [Started(lambda worker=worker: found.begin(worker, TOO_LONG)) for worker in (1, 2)]
        chief = Started(lambda: found.wait(2, TOO_LONG))
        time.sleep(0.05)
        found.end()
        assert [one.result() for one in waiting] == [None, None]
        assert chief.result()
        assert found.begin(0, 0) is None


BOUNDS = [0, 1, 2, 8, None]


class Run:
    """Checks every update; its staleness is counted from the pull of its parameters."""

    def __init__(self, bound: int | None, num_workers: int, last: int, first: int = 3):
        self.admission = admission(bound, first=first, num_workers=num_workers, target=last)
        self.bound, self.wanted = bound, list(range(first, last))
        self.used: list[int] = []
        self.pulled: dict[Ticket, int] = {}
        self.lock = threading.Lock()

    def begin(self, worker: int, seconds: float) -> Ticket | None:
        ticket = self.admission.begin(worker, seconds)
        with self.lock:
            self.pulled[ticket] = len(self.used)
        return ticket

    def use(self, ticket: Ticket) -> None:
        with self.lock:
            assert self.admission.use(ticket)
            by_tickets, found = self.admission.done - 1 - ticket.done, len(self.used) - self.pulled[ticket]
            assert 0 <= found <= by_tickets
            assert self.bound is None or by_tickets <= self.bound
            self.used.append(ticket.step)

    def check_end(self) -> None:
        assert sorted(self.used) == self.wanted
        assert self.bound != 0 or self.used == self.wanted
        assert self.admission.done == self.wanted[-1] + 1


@given(
    bound=st.sampled_from(BOUNDS),
    num_workers=st.integers(1, 4),
    at_a_time=st.integers(1, 3),
    events=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["begins", "begins", "ends", "ends", "is lost"]))
    ),
)
def test_events_in_any_order(bound, num_workers, at_a_time, events):
    """Each worker has up to `at_a_time` open tickets and uses the oldest first."""
    run, held = Run(bound, num_workers, last=15), [[] for _ in range(4)]
    # At the end all workers go on, in turn.
    events += [(worker, what) for worker in range(num_workers) for what in ("begins", "ends")] * 50
    for worker, what in events:
        own = held[worker]
        if what == "is lost":
            run.admission.lost(worker)
            assert not any(map(run.admission.use, own))
            own.clear()
        elif what == "ends" and own:
            run.use(own.pop(0))
        elif what == "begins" and worker < num_workers and len(own) < at_a_time:
            own += filter(None, [run.begin(worker, 0)])
    run.check_end()


@given(
    num_workers=st.integers(1, 4),
    events=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["begins", "begins", "ends", "ends", "is lost"]))
    ),
)
def test_no_batch_is_used_twice_or_left_out_whoever_is_lost(num_workers, events):
    found = Admission(0, bound=None, num_workers=num_workers, patience_seconds=0)
    found.run_to(10**6)
    used, held = [], [[] for _ in range(num_workers)]
    for worker, what in events:
        worker %= num_workers
        if what == "begins":
            held[worker].append(found.begin(worker, 0))
        elif what == "is lost":
            found.lost(worker)
            held[worker].clear()
        elif held[worker]:
            ticket = held[worker].pop(0)
            assert found.use(ticket)
            used.append(ticket.batch)
    for worker in range(num_workers):
        found.lost(worker)
    assert len(used) == len(set(used))
    for worker, position in enumerate(found.positions()):
        assert set(range(worker, position, num_workers)) <= set(used)
        assert position not in used


@pytest.mark.parametrize("seed", first_quick(range(3)))
@pytest.mark.parametrize("bound", BOUNDS)
def test_concurrent_workers_of_different_speeds(bound, seed):
    """With probability 0.1 a worker is lost in the middle of a step; it returns."""
    run = Run(bound, num_workers=4, last=83)

    def work(rank: int) -> None:
        draw = random.Random(f"{seed} {rank}")
        while (ticket := run.begin(rank, LIMIT_SECONDS)) is not None:
            time.sleep(draw.random() * 0.0005 * 4**rank / 4)
            if draw.random() < 0.1:
                run.admission.lost(rank)
                assert not run.admission.use(ticket)
            else:
                run.use(ticket)

    def lead() -> None:
        assert run.admission.wait(83, LIMIT_SECONDS)
        run.admission.end()

    at_once(lead, *[lambda rank=rank: work(rank) for rank in range(4)])
    run.check_end()
