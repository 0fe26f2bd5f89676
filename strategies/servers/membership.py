"""Which process of a parameter-server cluster this one is, and what its role does."""

import dataclasses
import re
import zlib
from collections.abc import Callable

import keras
import tensorflow as tf

from strategies.cluster import CHIEF, SERVER, WORKER, Cluster
from strategies.servers.chief import ServersStrategy, check_options
from strategies.servers.coordination import Coordination
from strategies.servers.group import Group
from strategies.servers.handlers import StoreHandlers
from strategies.servers.options import ServersOptions
from strategies.servers.server import Server
from strategies.servers.worker import Worker
from strategies.servers.worker_engine import WorkerEngine, layout_of
from strategies.synchronous import as_batches
from towers.devices import Devices
from towers.errors import UserError
from towers.layers.names import fresh_name_counts
from towers.options import StepOptions
from towers.precision import layer_precision
from towers.task import Batch, InputShard, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersMembership:
    """Attributes:
    cluster: chief, workers and servers, and which of them this process is.
    options: how the group works.
    secret: the secret that a process must send to connect; '' admits processes that have none.
    startup_timeout_seconds: seconds to wait for the other processes.
    """

    cluster: Cluster
    options: ServersOptions = dataclasses.field(default_factory=ServersOptions)
    secret: str = ""
    startup_timeout_seconds: float = 600.0

    def __post_init__(self):
        for role in (CHIEF, WORKER, SERVER):
            if not self.cluster.members(role):
                raise UserError(
                    f"strategy=ps without a process of role {role!r}: it needs a {CHIEF!r} that leads, a "
                    f"{WORKER!r} that computes and a {SERVER!r} that holds the parameters; add a {role!r} to the "
                    "cluster"
                )

    @property
    def role(self) -> str:
        return self.cluster.role

    @property
    def num_workers(self) -> int:
        return len(self.cluster.members(WORKER))

    def connected(self, settings: dict[str, int]) -> Group:
        """Connects to all servers; raises as `Group.connected`."""
        return Group.connected(
            self.cluster.members(SERVER),
            self.cluster.this,
            settings=settings,
            secret=self.secret,
            startup_timeout_seconds=self.startup_timeout_seconds,
            timeout_seconds=self.options.timeout_seconds,
        )

    def settings(self, options: StepOptions) -> dict[str, int]:
        """Checksums of the settings that must be the same in all processes, by name."""
        # Without the schedule: its length may depend on the data, which a server need not have.
        written = {
            "step options": repr(dataclasses.replace(options, schedule=None)),
            "servers options": repr(self.options),
        }
        # The text of a function holds its address, which differs between processes.
        return {what: zlib.crc32(re.sub(r" at 0x[0-9a-f]+", "", text).encode()) for what, text in written.items()}


def servers_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares=None, servers: ServersMembership
) -> ServersStrategy:
    """The strategy 'ps', for the chief.

    Args:
      task, devices, options, shares: as for `strategies.towers.towers_strategy`.
      servers: the cluster and the chief's membership.

    Raises:
      UserError: options that servers can't support, or a server that was started with other settings.
      PeerLost: a server could not be reached.
    """
    check_options(options, servers.options, servers.num_workers)
    return ServersStrategy(
        task,
        devices,
        options,
        shares,
        group=servers.connected(servers.settings(options)),
        servers=servers.options,
        num_workers=servers.num_workers,
        startup_timeout_seconds=servers.startup_timeout_seconds,
    )


def run_server(options: StepOptions, membership: ServersMembership) -> str:
    """Serves until the run ends; returns how it ended: 'done' or 'interrupted'.

    Raises:
      UserError: options that servers can't support, or a port that is taken.
      PeerLost: the chief did not connect in time, or was lost.
    """
    check_options(options, membership.options, membership.num_workers)
    store, settings = StoreHandlers(options.rule, options.clipping), membership.settings(options)
    coordination = None
    if membership.cluster.index == 0:
        others = membership.cluster.members(SERVER)[1:]

        def connect_others() -> Group:
            return Group.connected(
                others,
                membership.cluster.this,
                settings=settings,
                secret=membership.secret,
                startup_timeout_seconds=membership.startup_timeout_seconds,
                timeout_seconds=membership.options.timeout_seconds,
            )

        coordination = Coordination(
            membership.options,
            options.clipping,
            store,
            num_workers=membership.num_workers,
            stops_if_bad=options.on_nan == "stop",
            connect_others=connect_others,
        )
    server = Server(
        membership.cluster.this, store, settings=settings, secret=membership.secret, coordination=coordination
    )
    return server.serve(membership.startup_timeout_seconds)


def run_worker(
    task: Task,
    devices: Devices,
    options: StepOptions,
    membership: ServersMembership,
    *,
    shares=None,
    stop_asked: Callable[[], bool] = lambda: False,
    before_step: Callable[[int], None] = lambda step: None,
) -> str:
    """Computes until the run ends; returns how it ended: 'done' or 'interrupted'.

    Args:
      task, devices, options, shares: as for `strategies.towers.towers_strategy`.
      membership: the cluster and this worker's membership.
      stop_asked, before_step: as for `strategies.servers.worker.Worker`.

    Raises:
      UserError: options that servers can't support, or other settings than the servers'.
      PeerLost: a server could not be reached, or was lost.
    """
    check_options(options, membership.options, membership.num_workers)
    group = membership.connected(membership.settings(options))
    engine = _worker_engine(task, devices, options, membership, shares)
    worker = Worker(
        task,
        engine,
        group,
        layout_of(engine.tower.variables.parameters, len(group.servers)),
        membership.options,
        rank=membership.cluster.index,
        num_workers=membership.num_workers,
        stop_asked=stop_asked,
        before_step=before_step,
    )
    try:
        return worker.run()
    finally:
        group.close()


def _worker_engine(task, devices, options, membership: ServersMembership, shares) -> WorkerEngine:
    workers_per_batch = membership.num_workers if membership.options.is_sync else 1
    keras.utils.set_random_seed(options.seed)
    with layer_precision(options.precision), fresh_name_counts():
        model = task.build_model()
    dataset = as_batches(task.dataset("train", InputShard()))
    may_be_empty = workers_per_batch > 1 or options.accumulation > 1
    return WorkerEngine(
        task,
        model,
        devices,
        options,
        shares=shares,
        rank=membership.cluster.index,
        num_sharing=workers_per_batch,
        sends_sums=membership.options.is_sync,
        stand_in=_first_example(dataset) if may_be_empty else None,
        wire_precision=membership.options.wire_precision,
    )


def _first_example(dataset) -> Batch:
    return tf.nest.map_structure(lambda tensor: tensor[:1], next(iter(dataset)))
