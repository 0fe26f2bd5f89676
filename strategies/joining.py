"""Joining a ring: the processes of a cluster find each other, once, before anything is computed.

tf.distribute.MultiWorkerMirroredStrategy starts TensorFlow's server and its heartbeats; what workers then send
each other is `strategies.worker_exchange`.
"""

import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.cluster import CHIEF, RING_ROLES, WORKER, Cluster, Member
from strategies.worker_exchange import WireOptions
from towers.errors import UserError

_PROBE_SECONDS = 0.5


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
    cluster: Cluster,
    options: RingOptions | None = None,
    *,
    startup_timeout_seconds: float = 600.0,
    give_up: Callable[[str], None],
) -> Ring:
    """Starts this process's server and waits for all others; before TensorFlow computes anything.

    Args:
      cluster: who takes part, and which of them this is.
      options: how they meet.
      startup_timeout_seconds: how long to wait for the others.
      give_up: called with one line that names who did not come; it must end the process, because TensorFlow's
        wait can't be interrupted.

    Raises:
      UserError: this process is none of the ring's, its address is taken, or TensorFlow runs already.
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
    check_free(cluster.this)
    others = [member for member in members if member != cluster.this]
    with StartupWatch(others, startup_timeout_seconds, give_up):
        return Ring(members, rank, options, _backbone(cluster))


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


def check_free(member: Member) -> None:
    """Raises UserError when something else listens where this process is to listen."""
    host, _, port = member.address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # TensorFlow's server listens on every interface, whatever the name in the address.
            probe.bind(("", int(port)))
        except OSError as error:
            raise UserError(
                f"{member.name}: port {port} of {member.address} can't be used ({error.strerror}); "
                "end what has it, or choose another port for all workers"
            ) from error


class StartupWatch:
    """Within, others are looked for; those that never came by the deadline are named to `give_up`."""

    def __init__(self, others: Sequence[Member], timeout_seconds: float, give_up: Callable[[str], None]):
        self._missing = list(others)
        self._timeout_seconds, self._give_up = timeout_seconds, give_up
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "StartupWatch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._joined.set()
        self._thread.join()

    def _watch(self) -> None:
        # By the clock: where what is sent is dropped, each look at a machine takes a while.
        deadline = time.monotonic() + self._timeout_seconds
        while not self._joined.wait(min(_PROBE_SECONDS, self._timeout_seconds)):
            self._missing = [member for member in self._missing if not listens(member.address)]
            if time.monotonic() >= deadline and not self._joined.is_set():
                self._give_up(self._what_is_missing())
                return

    def _what_is_missing(self) -> str:
        waited = f"within --startup_timeout_seconds={self._timeout_seconds:g}"
        if not self._missing:
            return f"all workers listen, but did not join {waited}: look at their logs"
        named = ", ".join(f"{member.name} ({member.address})" for member in self._missing)
        return f"{named} did not come {waited}: start it, or mend its address in TF_CONFIG"


def listens(address: str, timeout_seconds: float = 0.3) -> bool:
    """Whether a TCP connection to 'host:port' is accepted."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds):
            return True
    except OSError:
        return False
