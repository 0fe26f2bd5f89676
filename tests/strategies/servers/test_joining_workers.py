"""What workers were started with is compared with the chief's settings, before their first step."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from launch.membership.free_ports import free_addresses
from models.own_task import OwnTask
from strategies.cluster import CHIEF, SERVER, WORKER, Cluster, Member
from strategies.run_settings import check_same
from strategies.servers.carrier import Start
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions
from strategies.servers.own.carrier import OwnCarrier
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.server import Server
from strategies.servers.tables import ParameterLayout
from tests.strategies.servers.at_once import LIMIT_SECONDS, Started
from tests.strategies.small_task import small_task
from tests.tiers import first_quick
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD
from towers.updates.schedules import Constant

LAYOUT = ParameterLayout.of({"kernel": (4, 3)}, {}, decays=lambda name, shape: False, num_servers=2)
TASK = small_task()
ROWS = np.arange(64, dtype=np.float32)
OTHER_IMAGES = dataclasses.replace(TASK.images, name="other")


class Run:
    """Two servers that serve, and their chief, which has started the run."""

    def __init__(self):
        self.members = [Member(SERVER, index, address) for index, address in enumerate(free_addresses(2))]
        servers = [self._server(index) for index in (0, 1)]
        self.servers = [Started(functools.partial(server.serve, LIMIT_SECONDS)) for server in servers]
        self.carrier = OwnCarrier(self.group(CHIEF, 0), LAYOUT, settings())
        self.carrier.start(
            Start(
                parameters={"kernel": tf.Variable(np.zeros((4, 3)))},
                slot_names=(),
                state=np.zeros(0),
                decays=np.zeros(12, bool),
                averaged=np.zeros(0, bool),
                step=0,
                updates=0,
            )
        )

    def _server(self, index: int) -> Server:
        store = StoreHandlers(SGD(), Clipping())
        coordination = Coordination(
            ServersOptions(), Clipping(), store, num_workers=2, stops_if_bad=True, connect_others=None
        )
        coordination = None if index else coordination
        return Server(self.members[index], store, settings={}, secret="", coordination=coordination)

    def group(self, role: str, index: int) -> Group:
        seconds = {"startup_timeout_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
        return Group.connected(self.members, Member(role, index), settings={}, secret="", **seconds)

    @contextlib.contextmanager
    def joined(self, worker: int, found=None) -> Iterator[Group]:
        with contextlib.closing(self.group(WORKER, worker)) as group:
            group.ask(0, "join", worker=worker, settings=found or settings())
            yield group


def settings(task=TASK, rate: float = 0.1, shape: tuple[int, ...] = (4, 3), workers: tuple[str, ...] = ("b:1",)):
    cluster = Cluster(addresses={"chief": ("a:1",), "worker": workers, "ps": ("c:1",)}, role="worker", index=0)
    options = StepOptions(schedule=Constant(rate))
    return ServersMembership(cluster=cluster).settings_with(task, options, {"kernel": shape})


OTHERS = {
    "batch_size=4": settings(small_task(batch_size=4)),
    "parameters.kernel=(4, 5)": settings(shape=(4, 5)),
    "augment=True": settings(small_task(augment=True)),
    "learning_rate=0.2": settings(rate=0.2),
    "images.name=other": settings(
        dataclasses.replace(TASK, images=dataclasses.replace(TASK.images, name="other"))
    ),
    "num_workers=2": settings(workers=("b:1", "d:1")),
}


@pytest.mark.parametrize("what", first_quick(OTHERS, 2))
def test_other_settings_end_every_process_with_the_same_line(what):
    run = Run()
    line = f"worker:1 was started with {what}, and chief:0 with {what.split('=')[0]}="
    with run.joined(0) as first:
        with refused(line), run.joined(1, OTHERS[what]):
            pass
        with refused(line):
            run.carrier.advance(1, 1)
        with refused(line):
            first.ask(0, "begin", worker=0, stop_asked=False)
    for server in run.servers:
        with refused(line):
            server.result()


@pytest.mark.timeout(60)
def test_a_worker_that_waits_for_its_step_ends_with_the_same_line():
    run, (what, others) = Run(), next(iter(OTHERS.items()))
    with run.joined(0) as first:
        waits = Started(functools.partial(first.ask, 0, "begin", worker=0, stop_asked=False, settled=0))
        # Long enough for the request to arrive; it waits at the server for two seconds.
        time.sleep(0.2)
        with refused(what), run.joined(1, others):
            pass
        with refused(what):
            run.carrier.advance(1, 1)
        with refused(f"worker:1 was started with {what}"):
            waits.result()
    for server in run.servers:
        with refused(what):
            server.result()


def test_a_worker_that_restarts_with_other_settings_does_not_end_the_run():
    run = Run()
    with run.joined(1):
        pass
    with refused("worker:1 was started with batch_size=4"), run.joined(1, OTHERS["batch_size=4"]):
        pass
    assert run.carrier.advance(0, 0).done == 0
    with run.joined(1):
        pass
    run.carrier.end("done")
    assert [server.result() for server in run.servers] == ["done", "done"]


def test_what_may_differ():
    """Numbers of threads, and settings that only the chief reads."""
    assert settings(small_task(num_input_threads=7, eval_batch_size=3)) == settings()


def shuffled(seed: int | None, staleness: str, *, reshuffles=False, rows=ROWS, accumulation=1):
    """Settings of a process whose data are shuffled with a seed, or differently in each process if it is None."""
    data = tf.data.Dataset.from_tensor_slices((rows[:, None], ROWS))
    data = data.shuffle(64, seed=seed, reshuffle_each_iteration=reshuffles).batch(8)
    task = OwnTask(
        model=keras.Sequential,
        train_data=data,
        eval_data=None,
        losses=keras.losses.MeanSquaredError(),
        batch_size=8,
    )
    cluster = Cluster(addresses={"chief": ("a:1",), "worker": ("b:1",), "ps": ("c:1",)}, role="worker", index=0)
    membership = ServersMembership(cluster=cluster, options=ServersOptions(engine="own", staleness=staleness))
    return membership.settings_with(task, StepOptions(accumulation=accumulation))


@pytest.mark.parametrize("staleness", first_quick(["sync", "async", "0", "4"]))
def test_processes_must_read_the_same_data(staleness):
    with refused("worker:1 was started with first_batches=", "use shuffle(..., seed=1)"):
        check_same({"chief:0": shuffled(None, staleness), "worker:1": shuffled(None, staleness)})
    with refused("worker:1 was started with first_features=", "all must read the same data"):
        check_same({"chief:0": shuffled(1, staleness), "worker:1": shuffled(1, staleness, rows=ROWS + 1)})
    check_same({"chief:0": shuffled(1, staleness), "worker:1": shuffled(1, staleness)})


def test_asynchronous_workers_may_shuffle_in_their_own_order_at_each_reading():
    found = shuffled(None, "async", reshuffles=True), shuffled(None, "async", reshuffles=True)
    check_same(dict(zip(("chief:0", "worker:1"), found, strict=True)))


@pytest.mark.parametrize("staleness, accumulation", [("sync", 1), ("0", 1), ("4", 2)])
def test_data_in_another_order_at_each_reading(staleness, accumulation):
    """A worker that replaces another one would compute other examples; so would a second microbatch."""
    more = {"staleness": staleness, "accumulation": accumulation}
    with refused("worker:0 reads the 'train' data in another order each time", "reshuffle_each_iteration=False"):
        shuffled(1, reshuffles=True, **more)
    shuffled(1, **more)
