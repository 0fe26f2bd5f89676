"""A worker restarts while its earlier process waits for a step: the step goes to the new process."""

import contextlib
import functools
import threading
import time

import numpy as np
import pytest

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, SERVER, WORKER, Member
from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import KEY, StoreHandlers
from strategies.servers.own.server import Server
from strategies.servers.own.steps.admission import Admission
from strategies.servers.own.steps.rounds import Rounds
from tests.strategies.servers.at_once import LIMIT_SECONDS, TOO_LONG, Started
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD


@pytest.mark.parametrize(
    "found",
    [
        Admission(0, bound=None, num_workers=2),
        Admission(0, bound=0, num_workers=2),
        Rounds(0, num_workers=2, needed=2),
    ],
    ids=["no bound", "turns", "rounds"],
)
def test_a_connection_that_is_lost_while_it_waits_gets_no_step(found):
    is_lost, waits = threading.Event(), threading.Event()

    def asks():
        waits.set()
        return is_lost.is_set()

    waiting = Started(functools.partial(found.begin, 0, TOO_LONG, is_lost=asks))
    assert waits.wait(LIMIT_SECONDS)
    is_lost.set()
    found.lost(0)
    assert waiting.result() is None
    found.run_to(1)
    # Later requests of the lost connection, which may come from a buffer, get no step.
    assert found.begin(0, 0, is_lost=is_lost.is_set) is None
    assert found.begin(0, 0) is not None


@pytest.fixture
def connect():
    """Connects members to a server on which no run has started."""
    (address,) = free_addresses(1)
    member = Member(SERVER, 0, address)
    serving = []

    def connect(staleness: str, role: str, index: int) -> Group:
        if not serving:
            store, options = StoreHandlers(SGD(), Clipping()), ServersOptions(staleness=staleness)
            coordination = Coordination(
                options, Clipping(), store, num_workers=1, stops_if_bad=True, connect_others=lambda: Group((), ())
            )
            server = Server(member, store, settings={}, secret="", coordination=coordination)
            serving.append(Started(functools.partial(server.serve, LIMIT_SECONDS)))
        seconds = {"startup_timeout_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
        return Group.connected([member], Member(role, index), settings={}, secret="", **seconds)

    yield connect
    assert serving[0].result() == "done"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("staleness", ["async", "0", "sync"])
def test_a_step_goes_to_the_workers_new_connection(connect, staleness):
    begin = {"what": "begin", "worker": 0, "stop_asked": False, "settled": 0}
    with contextlib.ExitStack() as groups:
        chief, before = (
            groups.enter_context(contextlib.closing(connect(staleness, *member)))
            for member in ((CHIEF, 0), (WORKER, 0))
        )
        chief.ask(0, "init", [np.zeros(2), np.zeros(2, bool)], key=KEY)
        chief.ask(0, "start", [np.zeros(0), np.zeros(0, bool)], step=0)
        waits = Started(functools.partial(before.ask, 0, **begin))
        while chief.ask(0, "run_to", wanted=0, until=0)[0]["absent"]:
            time.sleep(0.01)
        again = groups.enter_context(contextlib.closing(connect(staleness, WORKER, 0)))
        # Steps are allowed when the earlier connection is replaced, while its thread still waits.
        chief.ask(0, "run_to", wanted=0, until=1)
        assert again.ask(0, **begin)[0].get("step") == 0
        chief.ask(0, "end", how="done")
        with contextlib.suppress(Exception):
            waits.result()
