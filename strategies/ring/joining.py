"""Joining a ring: the processes of a cluster find each other once, before TensorFlow computes anything.

tf.distribute.MultiWorkerMirroredStrategy starts TensorFlow's server and its heartbeats. What workers send each
other afterwards is in `strategies.ring.collectives`.
"""

import dataclasses
import faulthandler
import itertools
import socket
import sys
import time
from collections.abc import Sequence

import tensorflow as tf

from strategies.cluster import CHIEF, RING_ROLES, WORKER, Cluster, Member
from strategies.errors import PeerLost
from strategies.ring.collectives import WireOptions
from towers.errors import UserError

_PROBE_SECONDS = 0.2
# TensorFlow's own part of joining is faster than this.
_SERVER_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingOptions:
    """Options of a ring.

    Attributes:
      wire: how gradients are sent.
      worker_shares: relative sizes of the workers' parts of a batch, by rank; None for parts in proportion to
        their numbers of towers.
      check_divergence_every_steps: steps from one comparison of the workers' parameters to the next; None for
        none.
    """

    wire: WireOptions = dataclasses.field(default_factory=WireOptions)
    worker_shares: tuple[float, ...] | None = None
    check_divergence_every_steps: int | None = None


class Ring:
    """This process's membership in a ring whose workers are connected.

    Attributes:
      members: the workers, by rank.
      rank: index of this worker.
      options: options of the ring.
    """

    def __init__(self, members: Sequence[Member], rank: int, options: RingOptions, backbone=None):
        """Use `join_ring` or `Ring.alone`."""
        self.members, self.rank, self.options = tuple(members), rank, options
        self._backbone = backbone  # keeps its heartbeats alive
        self._channels = itertools.count(1)

    @classmethod
    def alone(cls, options: RingOptions | None = None) -> "Ring":
        """A ring of one, for a process without a cluster."""
        return cls((Member(WORKER, 0),), 0, options or RingOptions())

    @property
    def num_workers(self) -> int:
        return len(self.members)

    def next_channel(self) -> int:
        """A new number for an exchange; the same on all workers, if they call this in the same order."""
        return next(self._channels)


def join_ring(
    cluster: Cluster, options: RingOptions | None = None, *, startup_timeout_seconds: float = 600.0
) -> Ring:
    """Waits for all other workers and starts this process's server. Call it before TensorFlow computes anything.

    Args:
      cluster: all processes, and which of them this one is.
      options: options of the ring.
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
    # All listened a moment ago. If one is lost now, TensorFlow waits without end and holds Python's lock.
    seconds = max(startup_timeout_seconds, _SERVER_SECONDS)
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        return Ring(members, rank, options, _backbone(cluster))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _backbone(cluster: Cluster) -> tf.distribute.Strategy:
    addresses = {role: list(cluster.addresses[role]) for role in (CHIEF, WORKER) if role in cluster.addresses}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(addresses),
        task_type=cluster.role,
        task_id=cluster.index,
        rpc_layer="grpc",
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
    )
    # Its log messages contain nothing that a user could act on.
    tf.get_logger().setLevel("ERROR")
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise UserError(
            "strategy 'ring': TensorFlow already runs in this process; join before the first tensor"
        ) from error


def wait_for_all(this: Member, others: Sequence[Member], timeout_seconds: float) -> None:
    """Listens on this member's address until every other member listens on its own.

    Raises:
      UserError: this member's address is in use.
      PeerLost: some members did not start in time; the message names them.
    """
    missing, deadline = list(others), time.monotonic() + timeout_seconds
    with listening(this):
        while missing := [member for member in missing if not listens(member.address)]:
            left = deadline - time.monotonic()
            if left <= 0:
                named = ", ".join(f"{member.name} ({member.address})" for member in missing)
                raise PeerLost(
                    f"{named} did not start within startup_timeout_seconds={timeout_seconds:g}: "
                    "start it, or correct its address in TF_CONFIG"
                )
            time.sleep(min(_PROBE_SECONDS, left))


def listening(member: Member) -> socket.socket:
    """A socket that listens where the member's server will. The kernel accepts connections to it.

    Raises:
      UserError: it cannot listen there, usually because another program does.
    """
    listener = socket.socket(member.family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # On every interface, like TensorFlow's server, which ignores the host in the address.
        listener.bind(("", member.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"{member.name}: cannot listen on port {member.port} of {member.address} ({error.strerror}); "
            "end the program that uses it, or choose another port for all workers"
        ) from error
    return listener


def listens(address: str, timeout_seconds: float = 0.3) -> bool:
    """Whether 'host:port' accepts a TCP connection."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds):
            return True
    except OSError:
        return False
