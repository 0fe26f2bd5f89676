"""Server 0 gives the part of a lost or late worker to another one: the update, the warning and the report."""

import time

import numpy as np
import pytest

from strategies.servers.options import SYNC, ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import KEY, StoreHandlers
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD

RATE, EXAMPLES = 0.5, 4
FIGURES = {"examples": EXAMPLES, "busy_seconds": 0.0, "input_seconds": 0.0, "sums": {}, "norm": 1.0}
# Part n of each batch has this gradient SUM and this change of the state.
GRADIENTS = np.float32([[1, 2], [30, 40]])
CHANGES = np.array([[0.5], [7.0]])


class ServerZero:
    """Server 0 and two workers, without connections.

    Attributes:
      coordination: the tested object.
    """

    def __init__(self, **options):
        self._store = StoreHandlers(SGD(), Clipping())
        self.coordination = Coordination(
            ServersOptions(staleness=SYNC, **options),
            Clipping(),
            self._store,
            num_workers=2,
            stops_if_bad=True,
            connect_others=lambda: Group((), ()),
        )
        self.start()

    def start(self, step: int = 0) -> None:
        self._store.init({"key": KEY}, [np.zeros(2, np.float32)])
        self.coordination.start({"step": step}, [np.zeros(1), np.ones(1, bool)])
        self.coordination.run_to({"until": 100, "wanted": 0}, ())

    def begun(self, worker: int) -> dict:
        found, _ = self.coordination.begin({"worker": worker, "stop_asked": False, "settled": 0}, ())
        return found

    def finish(self, worker: int, begun: dict) -> None:
        """Pushes the result that any worker computes for this part."""
        part = begun["part"]
        request = {
            **{"key": KEY, "step": begun["step"], "lease": begun["lease"], "worker": worker},
            **{"rate": RATE, "rows": [], "weight": float(EXAMPLES), "finite": True, "figures": FIGURES},
        }
        self.coordination.finish(request, [CHANGES[part] * EXAMPLES, GRADIENTS[part]])

    def step(self, *workers: int) -> list[int]:
        """Computes a round by these workers, in turn; returns the parts that they got."""
        begun = [self.begun(worker) for worker in workers]
        for worker, found in zip(workers, begun, strict=True):
            self.finish(worker, found)
        return [found["part"] for found in begun]

    def check(self, num_steps: int) -> dict:
        """Asserts that all parts were counted once in each step; returns the workers' figures."""
        _, (value,) = self._store.pull({"key": KEY}, ())
        _, (state,) = self.coordination.get_state({}, ())
        mean = GRADIENTS.sum(0) / (2 * EXAMPLES)
        np.testing.assert_allclose(value, -RATE * num_steps * mean, rtol=1e-6)
        np.testing.assert_allclose(state, num_steps * CHANGES.mean(0))
        report, _ = self.coordination.report({}, ())
        assert (report["done"], report["totals"]["examples"]) == (num_steps, num_steps * 2 * EXAMPLES)
        found = report["workers"]
        return {name: (own["steps"], own["taken_over"], own["failures"]) for name, own in found.items()}

    def absent(self) -> list[int]:
        return self.coordination.run_to({"until": 100, "wanted": 0}, ())[0]["absent"]


def test_a_lost_worker(caplog):
    server = ServerZero()
    assert server.step(0, 1) == [0, 1]
    server.coordination.lost(1)
    for _ in range(2):
        assert server.step(0) == [0]
        assert server.step(0) == [1]
    assert server.absent() == [1]
    assert caplog.messages == ["worker:1 was lost at step 1: worker:0 takes over its part of the batch"]
    assert server.step(1, 0) == [1, 0], "it returned"
    assert server.absent() == []
    assert caplog.messages[1:] == ["worker:1 is back: it computes its part of each batch again"]
    assert server.check(4) == {"worker:0": (6, 2, 0), "worker:1": (2, 0, 1)}


def test_a_worker_that_stands_still(caplog):
    server = ServerZero(worker_timeout_seconds=0.05)
    stopped = server.begun(1)
    server.step(0)
    time.sleep(0.06)
    assert server.step(0) == [1]
    server.finish(1, stopped)
    assert server.begun(0)["step"] == 1, "its gradient was refused"
    (line,) = caplog.messages
    assert line == (
        "worker:1 gave no gradient within worker_timeout_seconds=0.05 at step 0: worker:0 takes over its part of "
        "the batch"
    )
    assert server.check(1) == {"worker:0": (2, 1, 0), "worker:1": (0, 0, 1)}
    assert server.coordination.report({}, ())[0]["turned_away"] == 1


def test_a_stopped_worker_that_is_killed_then_is_one_loss():
    server = ServerZero(worker_timeout_seconds=0.05)
    server.begun(1)
    server.step(0)
    time.sleep(0.06)
    server.step(0)
    server.coordination.lost(1)
    assert server.check(1)["worker:1"] == (0, 0, 1)


@pytest.mark.parametrize("restarts", [False, True], ids=["before the start", "before a second start"])
def test_a_worker_that_was_lost_before_the_start(restarts):
    server = ServerZero()
    server.begun(1)
    server.coordination.lost(1)
    if restarts:
        server.start()
    assert [server.step(0), server.step(0)] == [[0], [1]]
    server.check(1)


def test_a_gradient_from_before_a_second_start_is_refused():
    """Both starts are at the same step, so the step does not tell them apart."""
    server = ServerZero()
    before = [server.begun(worker) for worker in (0, 1)]
    server.start()
    for worker, begun in enumerate(before):
        server.finish(worker, begun)
    server.check(0)
    server.step(0, 1)
    server.check(1)
