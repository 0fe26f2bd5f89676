"""A server or a worker of test_lost_workers.py. The test is the chief.

python -m tests.strategies.servers.lost_workers_program SECONDS     with TF_CONFIG set

SECONDS  time after which others compute the part of a worker that gives no gradient
SIGNAL   the number of a signal that the worker sends itself before it computes step AT_STEP
"""

import os
import sys

from launch.membership.tf_config import cluster_from
from strategies.cluster import SERVER, Cluster
from strategies.parameter_servers import run_server, run_worker
from strategies.servers.membership import ServersMembership
from strategies.servers.options import SYNC, ServersOptions
from tests.conftest import make_devices
from tests.strategies.small_task import random_task
from tests.towers.logical_cpus import cpus
from towers.options import StepOptions
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant

AT_STEP = 7
LIMIT_SECONDS = 60.0


def step_options() -> StepOptions:
    return StepOptions(rule=Momentum(), schedule=Constant(0.05), precision="float64", seed=3)


def membership_of(cluster: Cluster, worker_timeout_seconds: float) -> ServersMembership:
    options = ServersOptions(
        staleness=SYNC, worker_timeout_seconds=worker_timeout_seconds, timeout_seconds=LIMIT_SECONDS
    )
    return ServersMembership(cluster=cluster, options=options, startup_timeout_seconds=LIMIT_SECONDS)


def main() -> None:
    make_devices()
    membership = membership_of(cluster_from(os.environ["TF_CONFIG"]), float(sys.argv[1]))
    number = int(os.environ.get("SIGNAL", 0))

    def before_step(step: int) -> None:
        if number and step == AT_STEP:
            os.kill(os.getpid(), number)

    if membership.role == SERVER:
        run_server(step_options(), membership)
    else:
        run_worker(random_task(), cpus(1), step_options(), membership, before_step=before_step)


if __name__ == "__main__":
    main()
