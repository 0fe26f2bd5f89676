"""A process of parameter servers on TensorFlow's engine, which trains a model with frozen weights.

python -m tests.strategies.distribute.frozen_program      with TF_CONFIG set

A worker prints how often it pulled frozen weights; the chief, how far its values are from those of one device.
"""

import os

import keras
import numpy as np

from launch.membership.tf_config import cluster_from
from strategies.cluster import CHIEF, SERVER
from strategies.contract import Strategy
from strategies.distribute.frozen_weights import KeptWeights
from strategies.parameter_servers import joined_servers, run_server, run_worker
from strategies.registry import build_strategy
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions
from tests.conftest import make_devices
from tests.launch.spoilt_task import spoilt_task
from tests.strategies.small_task import values_of
from tests.towers.logical_cpus import cpus
from towers.options import StepOptions
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant

OPTIONS = StepOptions(rule=Momentum(), schedule=Constant(0.1), seed=3)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(16, "relu", trainable=False, name="frozen")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def trained(strategy: Strategy) -> dict[str, np.ndarray]:
    """The values after steps with frozen weights, and steps after these were changed as by a checkpoint."""
    strategy.run_steps(4)
    strategy.collect()
    frozen = strategy.engine.state()["frozen/kernel"]
    frozen.assign(-frozen)
    strategy.restored()
    strategy.run_steps(4)
    return values_of(strategy)


def main() -> None:
    options = ServersOptions(engine="tensorflow")
    cluster = cluster_from(os.environ["TF_CONFIG"])
    membership = ServersMembership(cluster=cluster, options=options, startup_timeout_seconds=60)
    membership = joined_servers(membership, num_cpus=2)
    task, pulls = spoilt_task(None, build), []
    if membership.role == SERVER:
        run_server(OPTIONS, membership)
    elif membership.role == CHIEF:
        strategy = build_strategy("ps", task, cpus(1), OPTIONS, servers=membership)
        found = trained(strategy)
        strategy.finish(completed=True)
        expected = trained(build_strategy("towers", task, cpus(2), OPTIONS))
        print(max(float(np.max(np.abs(found[name] - value))) for name, value in expected.items()))
    else:
        keep = KeptWeights._keep
        KeptWeights._keep = lambda self, *given: pulls.append(1) or keep(self, *given)
        run_worker(task, cpus(2), OPTIONS, membership)
        print(len(pulls))


if __name__ == "__main__":
    make_devices()
    main()
