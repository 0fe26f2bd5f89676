"""A worker's loop with real servers: with prefetch, each gradient is exactly one update late."""

from collections.abc import Sequence

import keras
import numpy as np
import pytest

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, SERVER, WORKER, Member
from strategies.data_checks.batches import as_batches
from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import KEY, StoreHandlers
from strategies.servers.own.server import Server
from strategies.servers.own.worker import Worker
from strategies.servers.own.worker_engine import WorkerEngine
from tests.strategies.servers.at_once import Started
from tests.strategies.small_task import SmallTask, small_task
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from towers.lookups import Lookups
from towers.options import StepOptions
from towers.task import InputShard
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD
from towers.updates.schedules import Constant

NUM_STEPS, NUM_SERVERS, RATE = 7, 2, 0.25


def worker_engine(task: SmallTask, options: StepOptions) -> WorkerEngine:
    keras.utils.set_random_seed(1)
    model = task.build_model()
    return WorkerEngine(
        task,
        model,
        cpus(1),
        options,
        Lookups(model, as_batches(task.dataset("train", InputShard())).element_spec),
        num_servers=NUM_SERVERS,
        num_sharing=1,
        sends_sums=False,
        stand_in=None,
        wire_precision="float32",
    )


class AlmostAlone:
    """One worker and two servers; the test is their chief."""

    def __init__(self, servers: ServersOptions):
        self._servers, self.task = servers, small_task()
        self.options = StepOptions(rule=SGD(), schedule=Constant(RATE), seed=3)
        self.engine = worker_engine(self.task, self.options)
        variables = self.engine.tower.variables.parameters
        self.first = self.engine.layout.stored({value.path: value.numpy() for value in variables}).vector
        addresses = enumerate(free_addresses(NUM_SERVERS))
        self._members = [Member(SERVER, index, address) for index, address in addresses]
        listening = [self._server(index) for index in range(NUM_SERVERS)]
        self._running = [Started(lambda server=server: server.serve(60.0)) for server in listening]
        self.chief = self._group(CHIEF)

    def _server(self, index: int) -> Server:
        store, coordination = StoreHandlers(SGD(), Clipping()), None
        if index == 0:
            coordination = Coordination(
                self._servers, Clipping(), store, num_workers=1, stops_if_bad=True, connect_others=None
            )
        return Server(self._members[index], store, settings={}, secret="", coordination=coordination)

    def _group(self, role: str) -> Group:
        seconds = {"startup_timeout_seconds": 20.0, "timeout_seconds": 20.0}
        return Group.connected(self._members, Member(role, 0, ""), settings={}, secret="", **seconds)

    def trained(self) -> tuple[np.ndarray, dict]:
        """All parameters after the steps, and the report of these steps."""
        layout = self.engine.layout
        pieces = [self.first[layout.vector.piece(index)] for index in range(NUM_SERVERS)]
        for index, piece in enumerate(pieces):
            self.chief.ask(index, "init", [piece, np.zeros(len(piece), bool)], key=KEY)
        self.chief.ask(0, "start", [np.zeros(0), np.zeros(0, bool)], step=0)
        group = self._group(WORKER)
        worker = Worker(self.task, self.engine, group, layout, self._servers, rank=0, num_workers=1)
        self._running.append(Started(worker.run))
        while not self.chief.ask(0, "run_to", wanted=NUM_STEPS, until=NUM_STEPS)[0]["reached"]:
            pass
        report, _ = self.chief.ask(0, "report")
        self.chief.ask_each("settle", {1: ({}, ())}, key=KEY, decided=report["decided"])
        found = np.concatenate([piece for _, (piece,) in self.chief.ask_all("pull", key=KEY)])
        self.chief.ask_all("end", how="done")
        assert self._running[-1].result() == "done"
        group.close()
        self.chief.close()
        assert [server.result() for server in self._running[:-1]] == ["done"] * NUM_SERVERS
        return found, report

    def computed_here(self, late: int) -> np.ndarray:
        """The parameters if each gradient is computed from the parameters `late` updates before it."""
        batches = iter(as_batches(self.task.dataset("train", InputShard())))
        made = [self.first]
        for step in range(NUM_STEPS):
            seen = made[max(0, step - late)]
            gradient = self.engine.compute(step, 0, seen, [], np.zeros(0), [next(batches)]).gradient
            made.append(made[-1] - np.float32(RATE) * gradient)
        return made[-1]


@pytest.mark.parametrize(
    "options, late",
    # Workers that pull in turn are also in test_whole_steps.py.
    first_quick([({"prefetch": True, "staleness": "1"}, 1), ({}, 0), ({"prefetch": True}, 1)]),
    ids=["ahead within a bound", "in turn", "ahead"],
)
def test_each_gradient_is_computed_from_the_parameters_that_were_pulled(options, late):
    group = AlmostAlone(ServersOptions(**options))
    found, report = group.trained()
    counted = {0: 1, late: NUM_STEPS - 1} if late else {0: NUM_STEPS}
    assert dict(report["staleness"]) == counted
    np.testing.assert_allclose(found, group.computed_here(late), rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, group.computed_here(1 - late), rtol=1e-3), "the test could not fail"


class TurnedAway(Group):
    """Server 0 as a late backup worker sees it: the worker gets every third round, and is never wanted."""

    def __init__(self, vector: np.ndarray, steps: Sequence[int]):
        super().__init__([Member(SERVER, 0, "")], [])
        self._vector, self._steps = vector, list(steps)

    def ask_in_turn(self, server, *requests):
        if not self._steps:
            return [({"end": "done"}, [])]
        step = self._steps.pop(0)
        reply = dict.fromkeys(("step", "batch", "done", "lease"), step)
        reply |= {"part": 0, "decided": None, "version": 0}
        return [(reply, [np.zeros(0), self._vector])]

    def ask(self, server, what, arrays=(), **fields):
        assert what == "admit"
        return {"wanted": False}, []


class CountedTask:
    """A task that records at which batch its training data start."""

    def __init__(self, task: SmallTask):
        self._task, self.starts = task, []

    def dataset(self, split, shard):
        self.starts.append(shard.first_batch)
        return self._task.dataset(split, shard)


def test_a_late_backup_worker_keeps_its_input_pipeline():
    """A user's own pipeline would read all earlier batches again at each start."""
    options = StepOptions(rule=SGD(), schedule=Constant(RATE), seed=3)
    engine, task = worker_engine(small_task(), options), CountedTask(small_task())
    variables = engine.tower.variables.parameters
    vector = engine.layout.stored({value.path: value.numpy() for value in variables}).vector
    group = TurnedAway(vector, range(0, 30, 3))
    servers = ServersOptions(staleness="sync", backup_workers=1)
    assert Worker(task, engine, group, engine.layout, servers, rank=0, num_workers=2).run() == "done"
    assert task.starts == [0]
