"""This process's place among parameter servers, and what it does there."""

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
from towers.layers.names import counted_anew
from towers.options import StepOptions
from towers.precision import layer_precision
from towers.task import Batch, InputShard, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersMembership:
    """Attributes:
    cluster: chief, workers and servers, and which this process is.
    options: how they work together.
    secret: who connects must know it; '' lets in whoever has none.
    startup_timeout_seconds: how long to wait for the others.
    """

    cluster: Cluster
    options: ServersOptions = dataclasses.field(default_factory=ServersOptions)
    secret: str = ""
    startup_timeout_seconds: float = 600.0

    def __post_init__(self):
        for role in (CHIEF, WORKER, SERVER):
            if not self.cluster.members(role):
                raise UserError(
                    f"strategy=ps without a process of role {role!r}: it takes a chief that leads, workers that "
                    "compute and servers that keep the parameters; as launch.local --chief --workers=2 --ps=1"
                )

    @property
    def role(self) -> str:
        return self.cluster.role

    @property
    def num_workers(self) -> int:
        return len(self.cluster.members(WORKER))

    def connected(self, settings: dict[str, int]) -> Group:
        """To all servers; raises as `Group.connected`."""
        return Group.connected(
            self.cluster.members(SERVER),
            self.cluster.this,
            settings=settings,
            secret=self.secret,
            startup_timeout_seconds=self.startup_timeout_seconds,
            timeout_seconds=self.options.timeout_seconds,
        )

    def settings(self, options: StepOptions) -> dict[str, int]:
        """A checksum of everything that all processes must have alike."""
        # A server may be without the data that say how long the schedule is.
        written = {
            "step options": repr(dataclasses.replace(options, schedule=None)),
            "servers options": repr(self.options),
        }
        # Functions are written with their address, which is another in every process.
        return {what: zlib.crc32(re.sub(r" at 0x[0-9a-f]+", "", text).encode()) for what, text in written.items()}


def servers_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares=None, servers: ServersMembership
) -> ServersStrategy:
    """The strategy 'ps', for the chief.

    Raises:
      UserError: what servers can't do, or processes that were started with other settings.
      PeerLost: a server did not come.
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
    """A server's whole life; how the run ended: 'done' or 'interrupted'.

    Raises:
      UserError: what servers can't do, or a port that is taken.
      PeerLost: the chief never came, or was lost.
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
    """A worker's whole life; how the run ended: 'done' or 'interrupted'.

    Args:
      task, devices, options, shares: as of any strategy.
      membership: the cluster and this worker's membership.
      stop_asked, before_step: as of `strategies.servers.worker.Worker`.

    Raises:
      UserError: what servers can't do, or other settings than the servers'.
      PeerLost: a server is gone, or never came.
    """
    check_options(options, membership.options, membership.num_workers)
    group = membership.connected(membership.settings(options))
    together = membership.num_workers if membership.options.is_sync else 1
    engine = _worker_engine(task, devices, options, membership, shares, together)
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


def _worker_engine(task, devices, options, membership: ServersMembership, shares, together: int) -> WorkerEngine:
    keras.utils.set_random_seed(options.seed)
    with layer_precision(options.precision), counted_anew():
        model = task.build_model()
    dataset = as_batches(task.dataset("train", InputShard()))
    may_be_empty = together > 1 or options.accumulation > 1
    return WorkerEngine(
        task,
        model,
        devices,
        options,
        shares=shares,
        rank=membership.cluster.index,
        num_sharing=together,
        sends_sums=membership.options.is_sync,
        stand_in=_first_example(dataset) if may_be_empty else None,
        wire_precision=membership.options.wire_precision,
    )


def _first_example(dataset) -> Batch:
    return tf.nest.map_structure(lambda tensor: tensor[:1], next(iter(dataset)))
