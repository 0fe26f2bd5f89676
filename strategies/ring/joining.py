"""Joining a ring: the processes of a cluster find each other, once, before anything is computed.

tf.distribute.MultiWorkerMirroredStrategy starts TensorFlow's server and its heartbeats; what workers then send
each other is `strategies.ring.worker_exchange`.
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
from strategies.ring.worker_exchange import WireOptions
from towers.errors import UserError

_PROBE_SECONDS = 0.2
# TensorFlow's own part of joining takes less.
_SERVER_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingOptions:
    """How workers meet.

    Attributes:
      wire: how gradients travel.
      worker_shares: how much of a batch each worker takes, by rank; None is in proportion to their towers.
      check_divergence_every_steps: steps between comparisons of the workers' parameters; None is never.
    """

    wire: WireOptions = dataclasses.field(default_factory=WireOptions)
    worker_shares: tuple[float, ...] | None = None
    check_divergence_every_steps: int | None = None


class Ring:
    """This process's place in a ring that stands.

    Attributes:
      members: the workers, by rank.
      rank: which of them this is.
      options: how they meet.
    """

    def __init__(self, members: Sequence[Member], rank: int, options: RingOptions, backbone=None):
        """Use `join_ring` or `Ring.alone`."""
        self.members, self.rank, self.options = tuple(members), rank, options
        self._backbone = backbone  # its heartbeats end with it
        self._channels = itertools.count(1)

    @classmethod
    def alone(cls, options: RingOptions | None = None) -> "Ring":
        """A ring of one, for a process without a cluster."""
        return cls((Member(WORKER, 0),), 0, options or RingOptions())

    @property
    def num_workers(self) -> int:
        return len(self.members)

    def next_channel(self) -> int:
        """A number for another exchange, the same on every worker that asks in the same order."""
        return next(self._channels)


def join_ring(
    cluster: Cluster, options: RingOptions | None = None, *, startup_timeout_seconds: float = 600.0
) -> Ring:
    """Waits for all others and starts this process's server; before TensorFlow computes anything.

    Args:
      cluster: who takes part, and which of them this is.
      options: how they meet.
      startup_timeout_seconds: how long to wait for the others.

    Raises:
      UserError: this process is none of the ring's, its address is taken, or TensorFlow runs already.
      PeerLost: naming who did not come in time.
    """
    if cluster.role not in RING_ROLES:
        raise UserError(
            f"role {cluster.role!r}: a ring has {' and '.join(RING_ROLES)} only; "
            "use --strategy=ring in their processes"
        )
    members, rank = cluster.ring, cluster.rank
    options = options or RingOptions()
    if len(members) == 1:
        return Ring(members, rank, options)
    wait_for_all(cluster.this, [member for member in members if member != cluster.this], startup_timeout_seconds)
    # All were there a moment ago. Should one be lost now, TensorFlow waits without end and holds Python's lock.
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
    # Its notices say nothing that the user could act on.
    tf.get_logger().setLevel("ERROR")
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise UserError(
            "strategy ring: TensorFlow is already running in this process; join before the first tensor"
        ) from error


def wait_for_all(this: Member, others: Sequence[Member], timeout_seconds: float) -> None:
    """Returns when every other member listens on its address, as this one does meanwhile.

    Raises:
      UserError: something else has this one's address.
      PeerLost: naming those who did not come in time.
    """
    missing, deadline = list(others), time.monotonic() + timeout_seconds
    with listening(this):
        while missing := [member for member in missing if not listens(member.address)]:
            left = deadline - time.monotonic()
            if left <= 0:
                named = ", ".join(f"{member.name} ({member.address})" for member in missing)
                raise PeerLost(
                    f"{named} did not come within --startup_timeout_seconds={timeout_seconds:g}: "
                    "start it, or mend its address in TF_CONFIG"
                )
            time.sleep(min(_PROBE_SECONDS, left))


def listening(member: Member) -> socket.socket:
    """A socket that listens where the member's server will: the kernel accepts for it.

    Raises:
      UserError: it can't, most likely because something else does.
    """
    listener = socket.socket(member.family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # On every interface, as TensorFlow's server does whatever the name in the address.
        listener.bind(("", member.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"{member.name}: port {member.port} of {member.address} can't be used ({error.strerror}); "
            "end what has it, or choose another port for all workers"
        ) from error
    return listener


def listens(address: str, timeout_seconds: float = 0.3) -> bool:
    """Whether a TCP connection to 'host:port' is accepted."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds):
            return True
    except OSError:
        return False
