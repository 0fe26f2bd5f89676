"""Flags of a ring, and this process's membership of it."""

import functools

from absl import flags

from launch import binary
from launch.flags.belonging import serves
from launch.flags.checks import listed_in_help, numbers_from, positive
from launch.flags.devices import devices_from_flags
from launch.membership.tf_config import public_addresses
from launch.membership.this_process import cluster_of_this_process, is_evaluator
from strategies.cluster import Cluster
from strategies.distribute.mirrored import num_gpus
from strategies.engines import ENGINES
from strategies.registry import cluster_kind, strategy_names
from strategies.ring.exchange.collectives import ALGORITHMS, WireOptions
from strategies.ring.exchange.joining import Ring, RingOptions, join_ring
from strategies.wire_precisions import WIRE_PRECISIONS
from towers.errors import UserError

FLAGS = flags.FLAGS

flags.DEFINE_enum(
    "engine",
    "auto",
    ENGINES,
    "For --strategy=ring and ps: runtime that trains. tensorflow: MultiWorkerMirroredStrategy or "
    "ParameterServerStrategy. own: this project's runtime. auto: tensorflow, unless another flag needs own; a "
    "run's first lines say which.",
)
flags.DEFINE_list(
    "worker_shares",
    None,
    "For --strategy=ring: relative number of examples of each batch for each worker, in order of rank, as 2,1. "
    "Default: in proportion to the workers' numbers of towers.",
)
flags.DEFINE_integer(
    "bytes_per_pack",
    WireOptions.bytes_per_pack,
    "For --strategy=ring: bytes of gradients that are sent in one all-reduce. Larger packs mean fewer messages, "
    "but a later first one. Default: 4194304; with more than 8 workers 524288 * workers.",
)
flags.DEFINE_enum(
    "wire_precision",
    "float32",
    tuple(WIRE_PRECISIONS),
    "For --strategy=ring and ps: number format in which processes send gradients. bfloat16 and float16 halve the "
    "bytes and lose precision; use them on a slow network.",
)
flags.DEFINE_enum(
    "all_reduce",
    "auto",
    ALGORITHMS,
    "For --strategy=ring: algorithm that sums gradients over the workers. ring, nccl: TensorFlow's. tcp: this "
    "project's own, for CPUs. auto: TensorFlow's choice; with --engine=own, tcp for gradients on a CPU.",
)
flags.DEFINE_integer(
    "check_divergence_every",
    1000,
    "For --strategy=ring: steps between checks that all workers hold the same parameters; 0 disables the check.",
)
flags.DEFINE_float(
    "startup_timeout_seconds",
    600.0,
    "For --strategy=ring and ps: seconds to wait at the start for the other processes.",
)
flags.DEFINE_float(
    "collective_timeout_seconds",
    WireOptions.timeout_seconds,
    "For --strategy=ring and ps: seconds to wait during a step for the other processes. Must exceed the time of a "
    "checkpoint and an export.",
)
serves("strategy", ("ring", "ps"), "engine", "wire_precision")
serves("strategy", ("ring",), "worker_shares", "bytes_per_pack", "all_reduce", "check_divergence_every")
positive("bytes_per_pack", "startup_timeout_seconds", "collective_timeout_seconds")
listed_in_help(__name__)


def ring_options_from_flags() -> RingOptions:
    """How the workers exchange gradients."""
    return RingOptions(
        engine=FLAGS.engine,
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
    """This process's membership of the ring of TF_CONFIG or of its Slurm step; None if --strategy uses no ring.

    The first call waits for all workers. Make it before TensorFlow computes anything.

    Raises:
      UserError: the cluster is invalid, or given for a strategy that runs in one process.
      PeerLost: not all workers connected in time.
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
    return join_ring(
        cluster,
        ring_options_from_flags(),
        num_gpus=num_gpus(devices_from_flags()),
        startup_timeout_seconds=timeout_seconds,
    )


def warn_of_public(cluster: Cluster) -> None:
    """Prints a warning for each address that the whole internet may reach."""
    for address in public_addresses(cluster):
        binary.warn(
            f"{address} is a public address, and its server asks for no password: anyone who reaches it can run "
            "code; use private addresses or a firewall"
        )


def _check_alone(cluster: Cluster | None) -> None:
    if cluster is not None and len(cluster.members()) > 1 and not cluster_kind(FLAGS.strategy):
        choices = " or ".join(f"--strategy={name}" for name in strategy_names() if cluster_kind(name))
        raise UserError(
            f"--strategy={FLAGS.strategy} runs in one process, but TF_CONFIG or Slurm names "
            f"{len(cluster.members())}: use {choices}, or set TF_CONFIG='{{}}' to train alone"
        )
