"""A process of a ring or of parameter servers on TensorFlow's engine, which reports the devices of its operations.

python -m tests.strategies.distribute.placement_program ring|ps      with TF_CONFIG set; a ring prints JSON
"""

import json
import os
import sys

from launch.membership.tf_config import cluster_from
from strategies.cluster import CHIEF, SERVER
from strategies.parameter_servers import joined_servers, run_server, run_worker
from strategies.registry import build_strategy
from strategies.ring.exchange.joining import RingOptions, join_ring
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions
from tests.conftest import make_devices
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from towers.options import StepOptions
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant

OPTIONS = StepOptions(rule=Momentum(), schedule=Constant(0.1), seed=3)


def on_a_ring(cluster) -> dict:
    """The devices on which a ring's step ran, and the class of its variables."""
    ring = join_ring(cluster, RingOptions(engine="tensorflow"), startup_timeout_seconds=60)
    strategy = build_strategy("ring", small_task(), cpus(2), OPTIONS, ring=ring)
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    kinds = {"towers": "MatMul", "updates": "ResourceApply", "sums": "CollectiveReduce"}
    devices = {
        what: sorted({node.device for node in graphs.nodes if kind in node.op}) for what, kind in kinds.items()
    }
    return {
        **devices,
        "variables": sorted({type(value).__name__ for value in strategy.engine.parameters().values()}),
    }


def on_servers(cluster) -> None:
    """Two steps on servers. TensorFlow itself writes the worker's graphs, as requested in its environment."""
    options = ServersOptions(engine="tensorflow")
    membership = ServersMembership(cluster=cluster, options=options, startup_timeout_seconds=60)
    membership = joined_servers(membership, num_cpus=2)
    if membership.role == SERVER:
        run_server(OPTIONS, membership)
    elif membership.role != CHIEF:
        run_worker(small_task(), cpus(2), OPTIONS, membership)
    else:
        strategy = build_strategy("ps", small_task(), cpus(1), OPTIONS, servers=membership)
        strategy.run_steps(2)
        strategy.finish(completed=True)


if __name__ == "__main__":
    make_devices()
    facts = {"ring": on_a_ring, "ps": on_servers}[sys.argv[1]](cluster_from(os.environ["TF_CONFIG"]))
    print(json.dumps(facts))
