"""Flags of parameter servers, and this process's membership of their cluster."""

import functools
import os

from absl import flags

from launch.flags.belonging import serves
from launch.flags.checks import at_least_zero, listed_in_help
from launch.flags.devices import devices_from_flags
from launch.flags.ring import warn_of_public
from launch.membership.slurm_step import SERVERS_VARIABLE
from launch.membership.this_process import cluster_of_this_process, is_evaluator
from strategies.cluster import CHIEF, SERVER, WORKER, Cluster
from strategies.engines import TENSORFLOW
from strategies.parameter_servers import joined_servers
from strategies.registry import cluster_kind
from strategies.servers.membership import ServersMembership
from strategies.servers.options import ServersOptions
from towers.errors import UserError
from towers.updates.sparse_updates import DENSE, SPARSE_UPDATES

FLAGS = flags.FLAGS
_SECRET_VARIABLE = "TOWERS_SECRET"
_START_ALL = "python -m launch.local --chief --workers=2 --ps=1 -- python -m launch.train --strategy=ps"

flags.DEFINE_string(
    "staleness",
    "async",
    "For --strategy=ps. async: apply each gradient when it arrives; no worker waits. sync: average the gradients "
    "of all workers and apply them once per step, which gives the numbers of one device. A number N: as async, "
    "but no update has a staleness above N; with 0 workers take turns. Use a number or sync if async does not "
    "converge.",
)
flags.DEFINE_integer(
    "backup_workers",
    0,
    "For --strategy=ps --staleness=sync: number of workers whose gradients a step does not wait for. Late "
    "gradients are dropped and counted. Raise it if stragglers slow training down.",
)
flags.DEFINE_bool(
    "staleness_aware",
    False,
    "For --strategy=ps: divide the learning rate of each update by its staleness. Not with --staleness=sync or "
    "--staleness=0.",
)
flags.DEFINE_bool(
    "prefetch_parameters",
    False,
    "For --strategy=ps: pull the next step's parameters while this step computes. Workers then do not wait for "
    "the network, but every update is staler by one. Not with --staleness=sync or --staleness=0.",
)
flags.DEFINE_integer(
    "steps_per_closure",
    0,
    "For --strategy=ps with TensorFlow's engine: steps that a worker computes for each call from the chief. A "
    "call takes some milliseconds, so raise it for fast steps. 0: chosen by the time of a step.",
)
flags.DEFINE_float(
    "worker_timeout_seconds",
    60.0,
    "For --strategy=ps: seconds without a worker's gradient until other workers do its work. With "
    "--staleness=sync or TensorFlow's engine they do it only if they took less than half as long, and at once if "
    "the worker is lost. TensorFlow's engine kills a process that is stopped (SIGSTOP) for so long. Otherwise: "
    "seconds that a worker may be away until the next one computes its batches too. Raise it if the workers' "
    "speeds differ much.",
)
flags.DEFINE_enum(
    "sparse_updates",
    DENSE,
    SPARSE_UPDATES,
    "For --strategy=ps: update of embedding tables of which workers pull only the rows of their batches. dense: "
    "exact, but with momentum, Adam or weight decay each update processes the whole table. lazy: updates only the "
    "rows of the batch and their momenta; much faster for large tables, but not exact.",
)
flags.DEFINE_bool(
    "admit_anyone",
    False,
    "For --strategy=ps --engine=own: start servers on addresses that other machines can reach although "
    "TOWERS_SECRET is not set. Anyone who connects can then change the parameters.",
)
at_least_zero("backup_workers", "steps_per_closure")
serves(
    "strategy",
    ("ps",),
    *("staleness", "backup_workers", "staleness_aware", "prefetch_parameters", "steps_per_closure"),
    *("sparse_updates", "admit_anyone", "worker_timeout_seconds"),
)
listed_in_help(__name__)


def servers_options() -> ServersOptions:
    """The options of parameter servers. Raises UserError for flags that contradict each other."""
    return ServersOptions(
        engine=FLAGS.engine,
        steps_per_closure=FLAGS.steps_per_closure,
        staleness=FLAGS.staleness,
        backup_workers=FLAGS.backup_workers,
        staleness_aware=FLAGS.staleness_aware,
        prefetch=FLAGS.prefetch_parameters,
        wire_precision=FLAGS.wire_precision,
        sparse_updates=FLAGS.sparse_updates,
        worker_timeout_seconds=FLAGS.worker_timeout_seconds,
        timeout_seconds=FLAGS.collective_timeout_seconds,
    )


@functools.cache
def servers_membership() -> ServersMembership | None:
    """This process's membership of the parameter servers' cluster; None if --strategy uses no servers.

    Raises:
      UserError: the environment describes no cluster, or one without a role that parameter servers need.
    """
    if cluster_kind(FLAGS.strategy) != "servers":
        return None
    cluster = cluster_of_this_process()
    _check_roles(cluster)
    secret = os.environ.get(_SECRET_VARIABLE, "")
    options = servers_options()
    if not secret or options.engine_choice().name == TENSORFLOW:
        warn_of_public(cluster)
    membership = ServersMembership(
        cluster=cluster,
        options=options,
        secret=secret,
        admit_anyone=FLAGS.admit_anyone,
        startup_timeout_seconds=FLAGS.startup_timeout_seconds,
    )
    if is_evaluator():
        return membership
    devices = devices_from_flags()
    return joined_servers(membership, num_cpus=devices.num_towers if devices.on_cpu else 1)


def _check_roles(cluster: Cluster | None) -> None:
    """Raises UserError if the cluster cannot run parameter servers."""
    if cluster is None:
        raise UserError(
            f"--strategy={FLAGS.strategy} needs several processes, but TF_CONFIG describes no cluster: "
            f"start all of them with {_START_ALL}"
        )
    missing = [role for role in (CHIEF, WORKER, SERVER) if not cluster.members(role)]
    if missing:
        raise UserError(
            f"--strategy={FLAGS.strategy}: the cluster has no process of role {missing[0]!r}, but parameter "
            f"servers need roles {CHIEF!r}, {WORKER!r} and {SERVER!r}: add it to TF_CONFIG, set "
            f"{SERVERS_VARIABLE}=1 under Slurm, or start all with {_START_ALL}"
        )
