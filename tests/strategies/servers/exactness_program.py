"""A server or a worker of test_exactness.py: pushes by each rule, then a training run. The test is the chief.

python -m tests.strategies.servers.exactness_program      with TF_CONFIG set
"""

import os
import time
from collections.abc import Sequence

import numpy as np

from launch.membership.tf_config import cluster_from
from strategies.cluster import SERVER, Cluster, Member
from strategies.parameter_servers import run_server, run_worker
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.key_value import KeyValueStore
from strategies.servers.own.server import Server
from tests.conftest import make_devices
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from towers.errors import UserError
from towers.options import StepOptions
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD, Adam, Momentum
from towers.updates.schedules import Cosine

RULES = {
    "sgd": SGD(),
    "momentum": Momentum(),
    "nesterov": Momentum(nesterov=True),
    "adam": Adam(),
    # Each update decays the value by a tenth (2.0 * RATE).
    "momentum with decay": Momentum(weight_decay=2.0),
}
NUM_WORKERS, NUM_SERVERS = 3, 2
PUSHES_OF_ONE = 20
NUM_PUSHES = NUM_WORKERS * PUSHES_OF_ONE
KEYS = tuple(f"value {turn}" for turn in range(10))
# The chief makes this key when a rule's servers accept no more connections.
OVER = "over"
# Large enough to be divided between servers.
SHAPE = (64, 1024)
RATE = 0.05
TRAINED_STEPS = 200
LIMIT_SECONDS = 60.0


def value_of(key: str) -> np.ndarray:
    return np.random.default_rng(KEYS.index(key)).normal(size=SHAPE).astype(np.float32)


def gradient_of(key: str) -> np.ndarray:
    """A gradient without elements near 0, so that each element shows a lost update."""
    draw = np.random.default_rng(100 + KEYS.index(key))
    return (draw.choice([-1, 1], SHAPE) * draw.uniform(0.5, 1.5, SHAPE)).astype(np.float32)


def done_key(key: str, rank: int) -> str:
    """The key under which a worker, after its pushes, reports how many updates of others it saw."""
    return f"{key}, worker {rank}"


def group_of(servers: Sequence[Member], this: Member) -> Group:
    seconds = {"startup_timeout_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
    return Group.connected(servers, this, settings={}, secret="", **seconds)


def pulled_when_there(values: KeyValueStore, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """The values of all keys; waits until all exist."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return values.pull(keys)
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def work(cluster: Cluster) -> None:
    """Pushes the same gradient repeatedly, as fast as possible, while other workers do the same."""
    group = group_of(cluster.members(SERVER), cluster.this)
    values = KeyValueStore(group)
    for key in KEYS:
        gradient = gradient_of(key)
        pulled_when_there(values, [key])
        staleness = [values.push(key, gradient, RATE) for _ in range(PUSHES_OF_ONE)]
        of_others = max(found - own for own, found in enumerate(staleness))
        values.init(done_key(key, cluster.index), np.float32([of_others]))
    pulled_when_there(values, [OVER])
    group.close()


def push_by_all_rules(cluster: Cluster) -> None:
    for rule in RULES.values():
        if cluster.role == SERVER:
            server = Server(cluster.this, StoreHandlers(rule, Clipping()), settings={}, secret="")
            server.serve(startup_timeout_seconds=LIMIT_SECONDS)
        else:
            work(cluster)


def step_options() -> StepOptions:
    """The options of the training run."""
    return StepOptions(rule=Momentum(), schedule=Cosine(RATE, TRAINED_STEPS), seed=3)


def membership_of(cluster: Cluster) -> ServersMembership:
    """The membership in the training run, which is asynchronous."""
    options = ServersOptions(engine="own")
    return ServersMembership(cluster=cluster, options=options, startup_timeout_seconds=LIMIT_SECONDS)


def main() -> None:
    make_devices()
    cluster = cluster_from(os.environ["TF_CONFIG"])
    push_by_all_rules(cluster)
    if cluster.role == SERVER:
        run_server(step_options(), membership_of(cluster))
    else:
        run_worker(small_task(), cpus(1), step_options(), membership_of(cluster))


if __name__ == "__main__":
    main()
