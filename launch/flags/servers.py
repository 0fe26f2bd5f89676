"""Flags of parameter servers, and this process's place among them."""

import functools
import os

from absl import flags

from launch.flags.checks import at_least_zero, listed_in_help
from launch.flags.ring import warn_of_public
from launch.membership.this_process import cluster_of_this_process
from strategies.registry import cluster_kind
from strategies.servers.membership import ServersPlace
from strategies.servers.options import ServersOptions
from towers.errors import UserError

FLAGS = flags.FLAGS
SECRET_VARIABLE = "TOWERS_SECRET"

flags.DEFINE_string(
    "staleness", "async", "ps: async, sync, or the largest staleness an update may have, from 0 on."
)
flags.DEFINE_integer("backup_workers", 0, "ps, sync: workers whose gradients a step does not wait for.")
flags.DEFINE_bool("staleness_aware", False, "ps: divide the rate of an update by its staleness.")
flags.DEFINE_bool(
    "prefetch_parameters",
    False,
    "ps: pull the next step's parameters while this one computes; every update is staler by one.",
)
at_least_zero("backup_workers")
listed_in_help(__name__)


@functools.cache
def servers_place() -> ServersPlace | None:
    """This process's place among the parameter servers of TF_CONFIG; None where --strategy has none.

    Raises:
      UserError: no cluster, or one that is not made for it.
    """
    if cluster_kind(FLAGS.strategy) != "servers":
        return None
    cluster = cluster_of_this_process()
    if cluster is None:
        raise UserError(
            f"--strategy={FLAGS.strategy} is of several processes and TF_CONFIG names none: start them all, as by "
            "python -m launch.local --chief --workers=2 --ps=1 -- python -m launch.train --strategy=ps"
        )
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        warn_of_public(cluster)
    options = ServersOptions(
        staleness=FLAGS.staleness,
        backup_workers=FLAGS.backup_workers,
        staleness_aware=FLAGS.staleness_aware,
        prefetch=FLAGS.prefetch_parameters,
        wire_precision=FLAGS.wire_precision,
        timeout_seconds=FLAGS.collective_timeout_seconds,
    )
    return ServersPlace(
        cluster=cluster,
        options=options,
        secret=secret,
        startup_timeout_seconds=FLAGS.startup_timeout_seconds,
    )
