"""Trains a random model on parameter servers whose numbers are exact, and compares it with one device.

    python -m launch.local --chief --workers=2 --ps=2 -- python -m tests.conformance.random_server_trials NUMBER

runs the one trial that NUMBER determines (only one, so that a refused model can't leave a group half-way): on our
own servers, with synchronous workers or with workers that take turns. With one worker (`--workers=1`) asynchronous
steps are exact too, and are tried on both engines. The chief prints what `random_trials` prints. Exit code 1 if
the trial differs by more than rounding.
"""

import dataclasses
import os
import sys

import keras
import numpy as np

from launch.membership.tf_config import cluster_from
from strategies.cluster import CHIEF, SERVER
from strategies.one_device_reference import reference_strategy
from strategies.parameter_servers import joined_servers, run_server, run_worker, servers_strategy
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ASYNC, SYNC, ServersOptions
from tests.conformance.random_models import KINDS, RandomModel
from tests.conformance.random_trials import NUM_DEVICES, Found, compared, random_options, random_shares
from tests.towers.logical_cpus import cpus
from towers.device_setup import configure_devices
from towers.errors import UserError

# Time until the others notice that a process has refused the model.
_SILENCE_SECONDS = 30.0


def take_part(number: int, membership: ServersMembership) -> Found | None:
    """Runs this process's part of a trial; returns the result at the chief, None elsewhere."""
    draw = np.random.default_rng(number)
    servers = _random_servers(draw, membership.num_workers)
    num_sharing = membership.num_workers if servers.is_sync else 1
    task = RandomModel(int(draw.integers(2**31)), str(draw.choice(KINDS)), False).task(draw, num_sharing)
    devices = dataclasses.replace(cpus(int(draw.integers(1, 4))), masks=bool(draw.random() < 0.25))
    shares = random_shares(draw, devices.num_towers)
    keras.utils.set_random_seed(number)
    options = random_options(draw)
    mode = f"{servers.engine} staleness={servers.staleness}, {devices.num_towers} towers a worker"
    membership = dataclasses.replace(membership, options=servers)
    try:
        membership = joined_servers(membership, num_cpus=NUM_DEVICES)
        if membership.role == SERVER:
            run_server(options, membership)
            return None
        if membership.role != CHIEF:
            run_worker(task, devices, options, membership, shares=shares)
            return None
        strategy = servers_strategy(task, devices, options, shares=shares, servers=membership)
        reference, _ = reference_strategy(task, strategy, options)
    except UserError as error:
        return Found(mode, None, str(error))
    found = compared(mode, strategy, reference, int(draw.integers(3, 7)))
    strategy.finish(completed=True)
    return found


def _random_servers(draw: np.random.Generator, num_workers: int) -> ServersOptions:
    # A bound of 0 makes the workers take turns, each with a whole batch.
    kinds = [("own", SYNC), ("own", "0")]
    if num_workers == 1:
        kinds += [("own", ASYNC), ("tensorflow", ASYNC)]
    engine, staleness = kinds[draw.integers(len(kinds))]
    is_own_async = engine == "own" and staleness == ASYNC
    return ServersOptions(
        engine=engine,
        staleness=staleness,
        # Nothing is stale.
        staleness_aware=bool(draw.random() < 0.3) and is_own_async,
        steps_per_closure=int(draw.integers(0, 4)) if engine == "tensorflow" else 0,
        timeout_seconds=_SILENCE_SECONDS,
    )


def main() -> int:
    configure_devices(num_towers=NUM_DEVICES, kind="cpu", threads_per_tower=1)
    cluster = cluster_from(os.environ["TF_CONFIG"])
    found = take_part(int(sys.argv[1]), ServersMembership(cluster=cluster, startup_timeout_seconds=60))
    if found is not None:
        print(found)
    return 0 if found is None or found.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
