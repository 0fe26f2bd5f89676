"""A step is on all servers or on none, whenever its worker dies: real workers and two real servers."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, SERVER, WORKER, Member
from strategies.data_checks.batches import as_batches
from strategies.errors import PeerLost
from strategies.servers.carrier import Start
from strategies.servers.options import ServersOptions
from strategies.servers.own.carrier import OwnCarrier
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.server import Server
from strategies.servers.own.worker import Worker
from strategies.servers.own.worker_engine import WorkerEngine
from tests.strategies.servers.at_once import LIMIT_SECONDS, Started
from tests.strategies.servers.own.test_worker import NUM_SERVERS, RATE, worker_engine
from tests.strategies.small_task import small_task
from towers.options import StepOptions
from towers.task import InputShard
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD
from towers.updates.schedules import Constant

NUM_WORKERS = 2
OPTIONS = StepOptions(rule=SGD(), schedule=Constant(RATE), seed=3)


@functools.cache
def engine_of_all() -> WorkerEngine:
    """One engine for all workers: it owns no values, and takes time to compile."""
    return worker_engine(small_task(), OPTIONS)


class DiesBeforeFinish(Group):
    """The connections of a worker that dies after its gradient was sent to all servers but server 0."""

    steps_to_live = 0

    def ask_in_turn(self, server, *requests):
        if len(requests) > 1:
            self.steps_to_live -= 1
            if self.steps_to_live < 0:
                self.close()
                raise PeerLost("this worker dies")
        return super().ask_in_turn(server, *requests)


class PullsLate(Group):
    """The connections of a worker whose pulls from the other servers wait until the test allows them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.began, self.may_pull = threading.Event(), threading.Event()

    def ask_each(self, what, requests, **fields):
        if what == "pull":
            self.began.set()
            assert self.may_pull.wait(LIMIT_SECONDS)
        return super().ask_each(what, requests, **fields)


class Recording:
    """An engine that records the first examples of the batches that it computes."""

    def __init__(self, engine):
        self._engine, self.seen, self.gradients = engine, [], []

    def compute(self, step, part, parameters, rows, state, batches):
        self.seen.append(batches[0].features.numpy().tobytes())
        computed = self._engine.compute(step, part, parameters, rows, state, batches)
        self.gradients.append(computed.gradient)
        return computed

    def __getattr__(self, name):
        return getattr(self._engine, name)


class Cluster:
    """Two servers in threads. The test is their chief, and starts workers."""

    def __init__(self, servers: ServersOptions, stops_if_bad: bool):
        self._servers, self._stops_if_bad = servers, stops_if_bad
        self._members = [
            Member(SERVER, index, address) for index, address in enumerate(free_addresses(NUM_SERVERS))
        ]
        listening = [self._server(member) for member in self._members]
        self.running = [Started(lambda server=server: server.serve(LIMIT_SECONDS)) for server in listening]
        self._workers: list[tuple[Group, Started]] = []
        self.engine = engine_of_all()
        self.layout = self.engine.layout
        self._group = self._connected(Group, Member(CHIEF, 0))
        self.chief = OwnCarrier(self._group, self.layout)
        variables = self.engine.tower.variables.parameters
        parameters = {value.path: tf.Variable(value.numpy()) for value in variables}
        self.first = self.layout.stored({name: value.numpy() for name, value in parameters.items()})
        self.chief.start(
            Start(
                parameters=parameters,
                slot_names=(),
                state=np.zeros(0),
                decays=np.zeros(len(self.first.vector), bool),
                averaged=np.zeros(0, bool),
                step=0,
                updates=0,
            )
        )

    def _server(self, member: Member) -> Server:
        store, coordination = StoreHandlers(SGD(), Clipping()), None
        if member.index == 0:
            coordination = Coordination(
                self._servers,
                Clipping(),
                store,
                num_workers=NUM_WORKERS,
                stops_if_bad=self._stops_if_bad,
                connect_others=None,
            )
        return Server(member, store, settings={}, secret="", coordination=coordination)

    def _connected(self, kind: type[Group], this: Member) -> Group:
        seconds = {"startup_timeout_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
        return kind.connected(self._members, this, settings={}, secret="", **seconds)

    def dying_worker(self, rank: int, *, engine=None, after: int = 0) -> Started:
        """Starts a worker that dies after some steps, when server 1 has its gradient and server 0 has not."""
        group = self._connected(DiesBeforeFinish, Member(WORKER, rank))
        group.steps_to_live = after
        return self._started(group, rank, engine or self.engine)

    def start_worker(self, rank: int, *, kind: type[Group] = Group, engine=None) -> Group:
        """Starts a worker in a thread; returns its connections."""
        group = self._connected(kind, Member(WORKER, rank))
        self._workers.append((group, self._started(group, rank, engine or self.engine)))
        return group

    def _started(self, group: Group, rank: int, engine) -> Started:
        parts = (small_task(), engine, group, self.layout, self._servers)
        return Started(Worker(*parts, rank=rank, num_workers=NUM_WORKERS).run)

    def run_to(self, step: int) -> None:
        while self.chief.advance(step, step).done < step:
            pass

    def values(self) -> np.ndarray:
        """All parameters, as in a checkpoint."""
        while not self.chief.pause().idle:
            pass
        found = [self.chief.read(None, name, 0, math.prod(shape)) for name, shape in self.layout.shapes.items()]
        return np.concatenate(found)

    def pieces(self, vector: np.ndarray) -> list[np.ndarray]:
        return [vector[self.layout.vector.piece(server)] for server in range(NUM_SERVERS)]

    def versions(self) -> list[int]:
        return [reply["version"] for reply, _ in self._group.ask_all("pull", key="parameters")]

    def end(self) -> None:
        self.chief.end("done")
        for group, worker in self._workers:
            assert worker.result() == "done"
            group.close()
        assert [server.result() for server in self.running] == ["done"] * NUM_SERVERS


@contextlib.contextmanager
def cluster(*, stops_if_bad: bool = True, **options) -> Iterator[Cluster]:
    found = Cluster(ServersOptions(engine="own", **options), stops_if_bad)
    yield found
    found.end()


def dies(found: Cluster) -> None:
    """A worker computes step 0 and dies when server 1 has its gradient and server 0 has not."""
    died = found.dying_worker(0)
    found.chief.advance(0, 1)
    with pytest.raises(PeerLost, match="this worker dies"):
        died.result()


class NotFinite:
    """An engine whose results are not finite."""

    def __init__(self, engine):
        self._engine = engine

    def compute(self, *arguments):
        return dataclasses.replace(self._engine.compute(*arguments), finite=False)

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_a_worker_dies_in_the_middle_of_a_push_and_the_run_is_saved():
    with cluster() as found:
        dies(found)
        for piece, first in zip(found.pieces(found.values()), found.pieces(found.first.vector), strict=True):
            np.testing.assert_array_equal(piece, first)
        found.start_worker(1)
        found.run_to(1)
        changed = [
            np.any(piece != first)
            for piece, first in zip(found.pieces(found.values()), found.pieces(found.first.vector), strict=True)
        ]
        assert (changed, found.versions()) == ([True, True], [1, 1])


@pytest.mark.full
def test_the_step_of_a_dead_worker_is_on_no_server_if_it_is_not_finite_when_computed_again():
    with cluster(stops_if_bad=False) as found:
        dies(found)
        found.start_worker(1, engine=NotFinite(found.engine))
        found.run_to(1)
        np.testing.assert_array_equal(found.values(), found.first.vector)
        assert found.versions() == [0, 0]


def test_a_worker_that_starts_again_repeats_no_batch_and_leaves_none_out():
    """Worker 0 of 2 computes the batches 0, 2, 4, ...; it dies in its third step. Worker 1 never comes."""
    dataset = as_batches(small_task().dataset("train", InputShard()))
    index_of = {batch.features.numpy().tobytes(): index for index, batch in enumerate(dataset.take(12))}
    assert len(index_of) == 12
    with cluster() as found:
        first, second = Recording(found.engine), Recording(found.engine)
        died = found.dying_worker(0, engine=first, after=2)
        found.run_to(2)
        found.chief.advance(3, 3)
        with pytest.raises(PeerLost, match="this worker dies"):
            died.result()
        found.start_worker(0, engine=second)
        found.run_to(5)
        found.values()
    assert [index_of[seen] for seen in first.seen] == [0, 2, 4]
    assert [index_of[seen] for seen in second.seen] == [4, 6, 8]


def test_bound_0_gives_one_devices_numbers_although_a_worker_is_lost():
    with cluster(staleness="0") as found:
        died = found.dying_worker(0, after=1)
        found.start_worker(1)
        found.chief.advance(3, 3)
        with pytest.raises(PeerLost, match="this worker dies"):
            died.result()
        found.run_to(5)
        values = found.values()
    engine, alone = found.engine, found.first.vector
    for step, batch in enumerate(as_batches(small_task().dataset("train", InputShard())).take(5)):
        alone = alone - np.float32(RATE) * engine.compute(step, 0, alone, [], np.zeros(0), [batch]).gradient
    np.testing.assert_allclose(values, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_staleness_aware_update_has_one_rate_on_all_servers():
    """Worker 1 pulls server 0 before two updates of worker 0, and server 1 after them."""
    with cluster(staleness_aware=True) as found:
        slow, quick = Recording(found.engine), Recording(found.engine)
        late = found.start_worker(1, kind=PullsLate, engine=slow)
        found.chief.advance(0, 3)
        assert late.began.wait(LIMIT_SECONDS)
        found.start_worker(0, engine=quick)
        while found.chief.advance(2, 3).done < 2:
            pass
        late.may_pull.set()
        found.run_to(3)
        values = found.values()
    changes = [*quick.gradients, slow.gradients[0] / 2]
    np.testing.assert_allclose(values, found.first.vector - RATE * sum(changes), rtol=1e-5, atol=1e-6)
