"""Losses that server 0 handles: a worker that is silent in the middle of a step, and another server."""

import functools
import threading

import numpy as np
import pytest

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, SERVER, WORKER, Member
from strategies.errors import PeerLost
from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import KEY, StoreHandlers
from strategies.servers.own.server import Server
from strategies.servers.own.steps.admission import Admission
from strategies.servers.wire import Refused
from tests.strategies.servers.at_once import LIMIT_SECONDS, Started
from tests.strategies.servers.lone_coordination import lone_coordination
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD

SOON = 0.05


def test_only_a_ticket_that_is_open_for_too_long_is_overdue():
    admission = Admission(0, bound=None, num_workers=2)
    admission.run_to(2)
    first, second = admission.begin(0, 0), admission.begin(1, 0)
    admission.use(first)
    assert admission.overdue(60.0) == set()
    waiting = Started(functools.partial(admission.begin, 0, LIMIT_SECONDS))
    while admission.overdue(-SOON) != {1}:
        assert waiting.is_running
    assert admission.missing(range(2)) == [1]
    admission.lost(1)
    assert waiting.result().step == second.step
    assert admission.overdue(-SOON) == {0}
    assert not admission.use(second)


def test_a_worker_that_asks_for_no_step_any_more_is_overdue():
    """The worker was stopped while it had no step: its machine keeps the connection open."""
    admission = Admission(0, bound=0, num_workers=2)
    assert admission.overdue(-SOON) == set(), "nobody has connected"
    assert admission.begin(1, 0) is None
    assert admission.overdue(60.0) == set()
    assert admission.overdue(-SOON) == {1}
    waiting = Started(functools.partial(admission.begin, 1, LIMIT_SECONDS))
    while admission.overdue(-SOON):
        assert waiting.is_running
    admission.end()
    waiting.result()
    admission.lost(1)
    assert admission.overdue(-SOON) == set()


def test_a_turn_of_a_worker_that_was_lost_before_goes_to_another_one():
    admission = Admission(0, bound=0, num_workers=2, lost={0})
    admission.run_to(2)
    assert [admission.begin(1, 0).step, admission.begin(1, 0)] == [0, None]
    assert admission.begin(0, 0) is None, "it is back, after its turn"


def test_a_turn_goes_to_another_worker_also_after_a_second_start():
    """A resumed run starts twice, the second time from its checkpoint."""
    found = lone_coordination(staleness="0")
    ask = {"stop_asked": False, "settled": 0}
    for until in (0, 5):
        found.start({"step": 0}, [np.zeros(0), np.zeros(0, bool)])
        found.run_to({"until": until, "wanted": 0}, ())
        if until == 0:
            for worker in (0, 1):
                found.connected(worker, worker)
            found._presence.returned(0)
            found.lost(0)
    reply, _ = found.begin({"worker": 1, "connection": 1, **ask}, ())
    assert reply.get("step") == 0


class LeftAlone(StoreHandlers):
    """A store whose update needs a lost server."""

    def apply(self, message, arrays):
        raise PeerLost("ps:1 was lost")


@pytest.fixture
def connected():
    """Connects members to a server with a timeout of half a second."""
    (address,) = free_addresses(1)
    member, options = Member(SERVER, 0, address), ServersOptions(timeout_seconds=0.5)
    store = LeftAlone(SGD(), Clipping())
    coordination = Coordination(
        options, Clipping(), store, num_workers=2, stops_if_bad=True, connect_others=lambda: Group((), ())
    )
    server = Server(member, store, settings={}, secret="", coordination=coordination)
    thread = threading.Thread(target=server.serve, args=(60.0,))
    thread.start()

    def connect(role: str, index: int) -> Group:
        this = Member(role, index, "")
        return Group.connected(
            [member], this, settings={}, secret="", startup_timeout_seconds=20.0, timeout_seconds=20.0
        )

    chief = connect(CHIEF, 0)
    yield chief, connect
    chief.ask(0, "end", how="done")
    chief.close()
    thread.join(timeout=20)
    assert not thread.is_alive()


def finish(worker: Group, index: int, granted, *, length: int = 4, rate=0.5) -> None:
    figures = {"examples": 8, "busy_seconds": 0.0, "input_seconds": 0.0, "sums": {}, "norm": 1.0}
    described = {
        "step": granted["step"],
        "done": granted["done"],
        "lease": granted["lease"],
        "worker": index,
        "since": granted["version"],
    }
    gradient = np.ones(length, np.float32)
    worker.ask(
        0,
        "finish",
        [np.zeros(0), gradient],
        **described,
        **{"key": KEY, "rate": rate, "rows": [], "finite": True, "weight": 8.0, "aware": False},
        figures=figures,
    )


def test_another_worker_computes_the_step_of_a_silent_one(connected):
    chief, connect = connected
    silent, other = connect(WORKER, 0), connect(WORKER, 1)
    chief.ask(0, "init", [np.zeros(4, np.float32), np.zeros(4, bool)], key=KEY)
    chief.ask(0, "start", [np.zeros(0), np.zeros(0, bool)], step=0)
    chief.ask(0, "run_to", wanted=0, until=1)
    lost, _ = silent.ask(0, "begin", worker=0, stop_asked=False, settled=0)
    granted, _ = other.ask(0, "begin", worker=1, stop_asked=False, settled=0)
    assert granted["step"] == lost["step"] == 0
    with pytest.raises(PeerLost, match="ps:0"):
        silent.check(0)
    with pytest.raises(PeerLost, match="ps:0"):
        finish(silent, 0, lost)
    finish(other, 1, granted)
    report, _ = chief.ask(0, "report")
    assert (report["done"], report["totals"]["examples"]) == (1, 8)
    assert {name: (own["steps"], own["failures"]) for name, own in report["workers"].items()} == {
        "worker:0": (0, 1),
        "worker:1": (1, 0),
    }
    _, (value,) = chief.ask(0, "pull", key=KEY)
    np.testing.assert_array_equal(value, np.full(4, -0.5, np.float32))
    for worker in (silent, other):
        worker.close()


@pytest.mark.parametrize("wrong, raised", [({"length": 3}, Refused), ({"rate": "fast"}, PeerLost)])
def test_a_step_whose_update_was_refused_or_failed_is_not_counted(connected, wrong, raised):
    chief, connect = connected
    first, other = connect(WORKER, 0), connect(WORKER, 1)
    chief.ask(0, "init", [np.zeros(4, np.float32), np.zeros(4, bool)], key=KEY)
    chief.ask(0, "start", [np.zeros(0), np.zeros(0, bool)], step=0)
    chief.ask(0, "run_to", wanted=0, until=1)
    granted, _ = first.ask(0, "begin", worker=0, stop_asked=False, settled=0)
    with pytest.raises(raised):
        finish(first, 0, granted, **wrong)
    assert chief.ask(0, "report")[0]["done"] == 0
    first.close()
    granted, _ = other.ask(0, "begin", worker=1, stop_asked=False, settled=0)
    assert granted["step"] == 0, "the only step"
    finish(other, 1, granted)
    report, _ = chief.ask(0, "report")
    assert (report["done"], report["totals"]["examples"]) == (1, 8)
    _, (value,) = chief.ask(0, "pull", key=KEY)
    np.testing.assert_array_equal(value, np.full(4, -0.5, np.float32))
    other.close()


def test_a_server_passes_on_the_name_of_a_lost_server(connected):
    chief, connect = connected
    worker = connect(WORKER, 0)
    with pytest.raises(PeerLost, match="ps:1 was lost"):
        worker.ask(0, "apply")
    worker.close()


def test_a_worker_that_connects_again_gets_its_step_again(connected):
    """Its earlier connection is still open: a machine that vanished closes nothing."""
    chief, connect = connected
    before = connect(WORKER, 0)
    chief.ask(0, "init", [np.zeros(2, np.float32), np.zeros(2, bool)], key=KEY)
    chief.ask(0, "start", [np.zeros(0), np.zeros(0, bool)], step=0)
    chief.ask(0, "run_to", wanted=0, until=1)
    begin = {"worker": 0, "stop_asked": False, "settled": 0}
    assert before.ask(0, "begin", **begin)[0]["step"] == 0
    again = connect(WORKER, 0)
    assert again.ask(0, "begin", **begin)[0]["step"] == 0, "the only step"
    with pytest.raises(PeerLost):
        before.ask(0, "begin", **begin)
    assert chief.ask(0, "report")[0]["workers"]["worker:0"]["failures"] == 1
    for worker in (before, again):
        worker.close()
