"""Flags of a ring, and this process's place in it."""

import functools

from absl import flags

from launch import binary
from launch.flags.checks import listed_in_help, numbers_from, positive
from launch.membership.tf_config import public_addresses
from launch.membership.this_process import cluster_of_this_process, is_evaluator
from strategies.cluster import Cluster
from strategies.registry import cluster_kind, strategy_names
from strategies.ring.joining import Ring, RingOptions, join_ring
from strategies.ring.worker_exchange import ALGORITHMS, WIRE_PRECISIONS, WireOptions
from towers.errors import UserError

FLAGS = flags.FLAGS

flags.DEFINE_list("worker_shares", None, "How much of a batch each worker takes; default: as many as its towers.")
flags.DEFINE_integer("bytes_per_pack", WireOptions.bytes_per_pack, "Gradients that share one collective.")
flags.DEFINE_enum("wire_precision", "float32", tuple(WIRE_PRECISIONS), "What gradients cross the wire in.")
flags.DEFINE_enum("all_reduce", "auto", ALGORITHMS, "Algorithm of collectives between workers.")
flags.DEFINE_integer("check_divergence_every", 1000, "Steps between comparisons of the workers; 0 is never.")
flags.DEFINE_float("startup_timeout_seconds", 600.0, "How long to wait for the other workers to come.")
flags.DEFINE_float(
    "collective_timeout_seconds",
    WireOptions.timeout_seconds,
    "How long to wait for the other workers in a step; longer than a checkpoint and an export take.",
)
positive("bytes_per_pack", "startup_timeout_seconds", "collective_timeout_seconds")
listed_in_help(__name__)


def ring_options_from_flags() -> RingOptions:
    """How workers meet."""
    return RingOptions(
        wire=WireOptions(
            bytes_per_pack=FLAGS.bytes_per_pack,
            precision=FLAGS.wire_precision,
            algorithm=FLAGS.all_reduce,
            timeout_seconds=FLAGS.collective_timeout_seconds,
        ),
        worker_shares=numbers_from("worker_shares"),
        check_divergence_every_steps=FLAGS.check_divergence_every or None,
    )


@functools.cache
def joined_ring() -> Ring | None:
    """This process's place in the ring of TF_CONFIG or of its Slurm step; None where --strategy joins none.

    The first call waits for all workers, and must come before TensorFlow computes anything.

    Raises:
      UserError: a cluster that can't be, or one for a strategy of one process.
      PeerLost: not all workers came.
    """
    cluster = cluster_of_this_process()
    if cluster_kind(FLAGS.strategy) != "ring":
        _check_alone(cluster)
        return None
    if is_evaluator():
        return None
    if cluster is None:
        return Ring.alone(ring_options_from_flags())
    warn_of_public(cluster)
    timeout_seconds = FLAGS.startup_timeout_seconds
    return join_ring(cluster, ring_options_from_flags(), startup_timeout_seconds=timeout_seconds)


def warn_of_public(cluster: Cluster) -> None:
    """A line for each address that anyone may reach."""
    for address in public_addresses(cluster):
        binary.warn(f"{address} can be reached from the internet, and nothing there asks for a password")


def _check_alone(cluster: Cluster | None) -> None:
    if cluster is not None and len(cluster.members()) > 1 and not cluster_kind(FLAGS.strategy):
        together = " or ".join(name for name in strategy_names() if cluster_kind(name))
        raise UserError(
            f"--strategy={FLAGS.strategy} is of one process, and TF_CONFIG or Slurm names "
            f"{len(cluster.members())}: use --strategy={together}, or unset TF_CONFIG"
        )
