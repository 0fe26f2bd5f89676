"""The model's state on server 0: a run that resumes from a checkpoint continues with the same bits."""

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, SERVER, WORKER, Member
from strategies.contract import Strategy
from strategies.data_checks.batches import as_batches
from strategies.registry import build_strategy
from strategies.servers.chief import ServersStrategy
from strategies.servers.options import SYNC, ServersOptions
from strategies.servers.own.carrier import OwnCarrier
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.server import Server
from strategies.servers.own.steps.model_state import ModelState
from strategies.servers.own.worker import Worker
from strategies.servers.own.worker_engine import WorkerEngine
from strategies.servers.report_section import SECTION
from tests.launch.spoilt_task import spoilt_task
from tests.strategies.servers.at_once import LIMIT_SECONDS, Started
from tests.strategies.small_task import assert_same_bits, values_of
from tests.towers.logical_cpus import cpus
from towers.lookups import Lookups
from towers.options import StepOptions
from towers.task import InputShard
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD
from towers.updates.schedules import Constant

OPTIONS = StepOptions(rule=SGD(), schedule=Constant(0.25), seed=3)
SERVERS = ServersOptions(engine="own", staleness=SYNC)
NUM_WORKERS = 2


def two_dtypes() -> keras.Model:
    """A model with moving statistics in float32, and further ones in float64."""
    inputs = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(8, "relu", name="hidden")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    exact = {"dtype": "float64", "center": False, "scale": False}
    hidden = keras.layers.BatchNormalization(name="exact", **exact)(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def connected(member: Member, this: Member) -> Group:
    seconds = {"startup_timeout_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
    return Group.connected([member], this, settings={}, secret="", **seconds)


def worker_engine(task) -> WorkerEngine:
    model, dataset = task.build_model(), as_batches(task.dataset("train", InputShard()))
    return WorkerEngine(
        task,
        model,
        cpus(1),
        OPTIONS,
        Lookups(model, dataset.element_spec),
        num_servers=1,
        num_sharing=NUM_WORKERS,
        sends_sums=True,
        stand_in=next(iter(dataset)),
        wire_precision="float32",
    )


@contextlib.contextmanager
def synchronous_run(task, engine: WorkerEngine) -> Iterator[Strategy]:
    """Context manager: the chief of one server and two workers, all in threads."""
    member, store = Member(SERVER, 0, free_addresses(1)[0]), StoreHandlers(SGD(), Clipping())
    coordination = Coordination(
        SERVERS,
        Clipping(),
        store,
        num_workers=NUM_WORKERS,
        stops_if_bad=True,
        connect_others=lambda: Group((), ()),
    )
    server = Server(member, store, settings={}, secret="", coordination=coordination)
    running = Started(lambda: server.serve(LIMIT_SECONDS))
    group = connected(member, Member(CHIEF, 0, ""))
    chief = ServersStrategy(
        task,
        cpus(1),
        OPTIONS,
        None,
        make_carrier=lambda strategy: OwnCarrier(group, strategy.layout),
        servers=SERVERS,
        num_workers=NUM_WORKERS,
        num_servers=1,
        startup_timeout_seconds=LIMIT_SECONDS,
    )
    groups = [connected(member, Member(WORKER, rank)) for rank in range(NUM_WORKERS)]
    more = {"num_workers": NUM_WORKERS}
    workers = [
        Started(Worker(task, engine, of_worker, engine.layout, SERVERS, rank=rank, **more).run)
        for rank, of_worker in enumerate(groups)
    ]
    yield chief
    chief.finish(True)
    for worker, of_worker in zip(workers, groups, strict=True):
        assert worker.result() == "done"
        of_worker.close()
    assert running.result() == "done"


@pytest.mark.full
def test_a_resumed_synchronous_run_has_the_bits_of_an_undisturbed_one():
    task, found = spoilt_task(None, two_dtypes), []
    engine = worker_engine(task)
    for resumes in (False, True):
        with synchronous_run(task, engine) as chief:
            chief.run_steps(3)
            if resumes:
                # As a resumed run does after it has read the checkpoint into these variables.
                chief.collect()
                chief.restored()
            report = chief.run_steps(3)
            assert [worker.steps for worker in report.sections[SECTION].workers] == [3, 3]
            found.append(values_of(chief))
    assert_same_bits(*found)


def frozen_layers() -> keras.Model:
    """A model whose weights are mostly frozen: the wide kernel has a megabyte."""
    inputs = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(256, "relu", trainable=False, name="frozen")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Dense(1024, "tanh", use_bias=False, trainable=False, name="wide")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


@pytest.mark.full
def test_workers_pull_frozen_weights_once_for_each_start():
    task = spoilt_task(None, frozen_layers)
    with synchronous_run(task, worker_engine(task)) as chief:
        expected = build_strategy("towers", task, cpus(NUM_WORKERS), OPTIONS)
        for kind in ("parameters", "state"):
            for name, variable in getattr(expected.engine, kind)().items():
                variable.assign(getattr(chief.engine, kind)()[name])
        for strategy in (chief, expected):
            strategy.run_steps(3)
            # As a resumed run does after it has read the checkpoint into these variables.
            strategy.collect()
            frozen = strategy.engine.state()["wide/kernel"]
            frozen.assign(-frozen)
            strategy.restored()
            report = strategy.run_steps(3)
            strategy.collect()
            if strategy is chief:
                (server,) = report.sections[SECTION].servers
        for name, value in values_of(expected).items():
            np.testing.assert_allclose(values_of(chief)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    wide_bytes, pulls = 4 * 256 * 1024, 2 * NUM_WORKERS
    assert pulls * wide_bytes < server.sent_bytes < (pulls + 1) * wide_bytes
    assert server.received_bytes < 3 * wide_bytes, "workers send no changes of frozen weights"


@pytest.mark.parametrize("narrow", ["float32", "bfloat16", "int32"])
def test_each_element_has_the_precision_of_its_variable(narrow):
    state = ModelState(np.zeros(4), np.array([True, True, False, False]), [(narrow, 2), ("float64", 2)])
    state.add(np.array([3.3, -7.7, 0.1, 1e-12]), weight=3.0)
    expected = tf.cast(tf.cast(tf.constant([3.3 / 3, -7.7 / 3], tf.float64), narrow), tf.float64)
    np.testing.assert_array_equal(state.read(), [*expected.numpy(), 0.1, 1e-12])
