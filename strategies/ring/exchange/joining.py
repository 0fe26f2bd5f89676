"""Joining a ring: the processes of a cluster find each other once, before TensorFlow computes anything.

tf.distribute.MultiWorkerMirroredStrategy starts TensorFlow's server and its heartbeats, whichever engine trains.
"""

import contextlib
import dataclasses
import faulthandler
import itertools
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.eager import context  # has no public name

from strategies.cluster import CHIEF, RING_ROLES, WORKER, Cluster, Member
from strategies.engines import check_engine
from strategies.ring.exchange.collectives import WireOptions
from strategies.waiting import wait_for_all
from towers.errors import UserError

# An upper bound of the time that TensorFlow itself needs to join.
_SERVER_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingOptions:
    """Options of a ring.

    Attributes:
      engine: one of `strategies.engines.ENGINES`.
      wire: how gradients are sent.
      worker_shares: relative sizes of the workers' parts of a batch, by rank; None for parts in proportion to
        their numbers of towers.
      check_divergence_every_steps: number of steps between comparisons of the workers' parameters; None for no
        comparison.

    Raises:
      UserError: the engine is unknown.
    """

    engine: str = "auto"
    wire: WireOptions = dataclasses.field(default_factory=WireOptions)
    worker_shares: tuple[float, ...] | None = None
    check_divergence_every_steps: int | None = None

    def __post_init__(self):
        check_engine(self.engine)


class Ring:
    """This process's membership in a ring whose workers are connected.

    Attributes:
      members: the workers, by rank.
      rank: index of this worker.
      options: options of the ring.
      multi_worker: TensorFlow's strategy, which also holds the heartbeats; None for a ring of one worker.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        options: RingOptions,
        multi_worker: tf.distribute.MultiWorkerMirroredStrategy | None = None,
    ):
        """Use `join_ring` or `Ring.alone`."""
        self.members, self.rank, self.options = tuple(members), rank, options
        self.multi_worker = multi_worker
        self._channels = itertools.count(1)

    @classmethod
    def alone(cls, options: RingOptions | None = None) -> "Ring":
        """A ring of one, for a process without a cluster."""
        return cls((Member(WORKER, 0),), 0, options or RingOptions())

    @property
    def num_workers(self) -> int:
        return len(self.members)

    def own_examples(self, batch_size: int) -> int:
        """About how many examples of a batch this worker computes, whatever the numbers of towers."""
        shares = self.options.worker_shares
        if shares is None or len(shares) != self.num_workers:
            return batch_size // self.num_workers
        return int(batch_size * shares[self.rank] / sum(shares))

    def next_channel(self) -> int:
        """A new number for an exchange; the same on all workers, if they call this in the same order."""
        return next(self._channels)


def join_ring(
    cluster: Cluster,
    options: RingOptions | None = None,
    *,
    num_gpus: int = 0,
    startup_timeout_seconds: float = 600.0,
) -> Ring:
    """Waits for all other workers and starts this process's server. Call it before TensorFlow computes anything.

    Args:
      cluster: all processes, and which of them this one is.
      options: options of the ring.
      num_gpus: number of GPUs of this process that TensorFlow's engine uses, each as a replica; 0 for CPUs.
      startup_timeout_seconds: seconds to wait for the others.

    Raises:
      UserError: this process has no role in a ring, its address is in use, or TensorFlow already runs.
      PeerLost: some workers did not start in time; the message names them.
    """
    if cluster.role not in RING_ROLES:
        raise UserError(
            f"role {cluster.role!r}: a ring has only the roles {' and '.join(RING_ROLES)}; "
            "use strategy 'ring' in processes with these roles"
        )
    members, rank = cluster.ring, cluster.rank
    options = options or RingOptions()
    if len(members) == 1:
        return Ring(members, rank, options)
    wait_for_all(cluster.this, [member for member in members if member != cluster.this], startup_timeout_seconds)
    # All listened a moment ago. If one is lost now, TensorFlow waits forever and holds Python's lock.
    seconds = max(startup_timeout_seconds, _SERVER_SECONDS)
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        return Ring(members, rank, options, _multi_worker(cluster, options.wire, num_gpus))
    finally:
        faulthandler.cancel_dump_traceback_later()


def implementation_of(algorithm: str, num_gpus: int) -> tf.distribute.experimental.CommunicationImplementation:
    """TensorFlow's name of an algorithm of `WireOptions`, for workers with so many GPUs each."""
    implementations = tf.distribute.experimental.CommunicationImplementation
    if algorithm == "auto" and num_gpus:
        # TensorFlow's AUTO would send everything through the host's memory: it uses NCCL only if told to.
        return implementations.NCCL
    return {"ring": implementations.RING, "nccl": implementations.NCCL}.get(algorithm, implementations.AUTO)


@contextlib.contextmanager
def without_scoped_allocator() -> Iterator[None]:
    """Context manager: a MultiWorkerMirroredStrategy leaves TensorFlow's scoped allocator off.

    The scoped allocator puts inputs of CollectiveReduce into one buffer. The strategy's own exchanges are
    CollectiveReduceV2, so it would affect only those of synced statistics. It leaves their graph unsorted, and
    TensorFlow then runs the graph without any optimization (2.21). The strategy overrides the option of
    tf.config.optimizer.
    """
    configured = context.context()
    configure = configured.configure_collective_ops
    configured.configure_collective_ops = lambda **named: configure(**named | {"scoped_allocator_enabled_ops": ()})
    try:
        yield
    finally:
        del configured.configure_collective_ops


def _multi_worker(cluster: Cluster, wire: WireOptions, num_gpus: int) -> tf.distribute.MultiWorkerMirroredStrategy:
    addresses = {role: list(cluster.addresses[role]) for role in (CHIEF, WORKER) if role in cluster.addresses}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(addresses),
        task_type=cluster.role,
        task_id=cluster.index,
        rpc_layer="grpc",
        num_accelerators={"GPU": num_gpus},
    )
    communication = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=wire.pack_bytes(len(cluster.ring)),
        timeout_seconds=wire.timeout_seconds,
        implementation=implementation_of(wire.algorithm, num_gpus),
    )
    # Its log messages contain nothing that a user could act on.
    tf.get_logger().setLevel("ERROR")
    try:
        with without_scoped_allocator():
            return tf.distribute.MultiWorkerMirroredStrategy(resolver, communication)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise UserError(
            "strategy 'ring': TensorFlow already runs in this process; join before the first tensor"
        ) from error
