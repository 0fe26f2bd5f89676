"""The chief, a server and a worker of our own servers, each from start to end."""

from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from strategies.cluster import Member
from strategies.data_checks.batches import as_batches
from strategies.data_checks.built_model import built_model
from strategies.data_checks.data_errors import readable_input
from strategies.errors import PeerLost
from strategies.run_settings import Plain
from strategies.servers.checks import check_options
from strategies.servers.chief import ServersStrategy
from strategies.servers.membership import ServersMembership
from strategies.servers.own.carrier import OwnCarrier
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.server import Server
from strategies.servers.own.worker import Worker
from strategies.servers.own.worker_engine import WorkerEngine
from strategies.servers.wire import RunEnded
from towers.devices import HOST, Devices
from towers.input.tower_parts import open_length
from towers.layers.table_rows import tables_without_values
from towers.lookups import Lookups
from towers.options import StepOptions
from towers.task import Batch, InputShard, Task
from towers.updates.sparse_updates import LAZY

# The longest time between the chief's signs of life to the servers.
_LONGEST_SILENCE_SECONDS, _SIGNS_IN_A_TIMEOUT = 10.0, 4


def connected(
    membership: ServersMembership,
    servers: Sequence[Member],
    settings: Mapping[str, Plain],
    *,
    gives_up: Callable[[], bool] = lambda: False,
) -> Group:
    """Connects to some servers; arguments and errors as in `Group.connected`."""
    return Group.connected(
        servers,
        membership.cluster.this,
        settings=settings,
        secret=membership.secret,
        cluster=membership.cluster_checksum,
        admit_anyone=membership.admit_anyone,
        startup_timeout_seconds=membership.startup_timeout_seconds,
        timeout_seconds=membership.options.timeout_seconds,
        gives_up=gives_up,
    )


def own_servers_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares=None, servers: ServersMembership
) -> ServersStrategy:
    """The strategy 'ps', for the chief.

    Args:
      task, devices, options, shares: as for `strategies.towers.towers_strategy`.
      servers: the cluster and the chief's membership.

    Raises:
      UserError: an option is not supported by servers, or a server was started with other settings.
      PeerLost: a server could not be reached.
    """
    check_options(options, servers.options, servers.num_workers)
    group = connected(servers, servers.servers, servers.settings(options))
    group.show_life(min(_LONGEST_SILENCE_SECONDS, servers.options.timeout_seconds / _SIGNS_IN_A_TIMEOUT))
    return ServersStrategy(
        task,
        devices,
        options,
        shares,
        make_carrier=lambda strategy: OwnCarrier(
            group,
            strategy.layout,
            servers.settings_with(task, options, strategy.layout.shapes),
        ),
        servers=servers.options,
        num_workers=servers.num_workers,
        num_servers=len(servers.servers),
        startup_timeout_seconds=servers.startup_timeout_seconds,
    )


def run_own_server(
    options: StepOptions, membership: ServersMembership, *, stop_asked: Callable[[], bool] = lambda: False
) -> str:
    """Serves until the run ends; returns how it ended: 'done' or 'interrupted'.

    Args:
      options: how a step is computed.
      membership: the cluster and this server's membership.
      stop_asked: as for `Server.serve`.

    Raises:
      UserError: an option is not supported by servers, or the port is taken.
      PeerLost: the chief did not connect in time, or was lost.
    """
    check_options(options, membership.options, membership.num_workers)
    lazily = membership.options.sparse_updates == LAZY
    store = StoreHandlers(options.rule, options.clipping, lazily=lazily)
    settings = membership.settings(options)
    coordination = None
    if membership.cluster.index == 0:
        others = membership.servers[1:]

        def connect_others() -> Group:
            return connected(membership, others, settings)

        coordination = Coordination(
            membership.options,
            options.clipping,
            store,
            num_workers=membership.num_workers,
            stops_if_bad=options.on_nan == "stop",
            connect_others=connect_others,
        )
    server = Server(
        membership.cluster.this,
        store,
        settings=settings,
        secret=membership.secret,
        cluster=membership.cluster_checksum,
        admit_anyone=membership.admit_anyone,
        coordination=coordination,
        timeout_seconds=membership.options.timeout_seconds,
    )
    return server.serve(membership.startup_timeout_seconds, stop_asked=stop_asked)


def run_own_worker(
    task: Task,
    devices: Devices,
    options: StepOptions,
    membership: ServersMembership,
    *,
    shares=None,
    stop_asked: Callable[[], bool] = lambda: False,
    before_step: Callable[[int], None] = lambda step: None,
) -> str:
    """Computes steps until the run ends; returns how the run ended: 'done' or 'interrupted'.

    Args:
      task, devices, options, shares: as for `strategies.towers.towers_strategy`.
      membership: the cluster and this worker's membership.
      stop_asked, before_step: as for `strategies.servers.own.worker.Worker`.

    Raises:
      UserError: an option is not supported by servers, or the servers were started with other settings.
      PeerLost: a server could not be reached, or was lost.
    """
    check_options(options, membership.options, membership.num_workers)
    # Its settings are compared with the chief's in `join`.
    try:
        group = connected(membership, membership.servers, {}, gives_up=stop_asked)
    except PeerLost:
        if stop_asked():
            return "interrupted"
        raise
    engine = _worker_engine(task, devices, options, membership, shares)
    settings = membership.settings_with(task, options, engine.layout.shapes)
    worker = Worker(
        task,
        engine,
        group,
        engine.layout,
        membership.options,
        rank=membership.cluster.index,
        num_workers=membership.num_workers,
        stop_asked=stop_asked,
        before_step=before_step,
    )
    try:
        worker.join(settings)
        return worker.run()
    except RunEnded as ended:
        return ended.how
    finally:
        group.close()


def _worker_engine(task, devices, options, membership: ServersMembership, shares) -> WorkerEngine:
    workers_per_batch = membership.num_workers if membership.options.is_sync else 1
    keras.utils.set_random_seed(options.seed)
    # The servers hold the parameters: the template need not use a GPU's memory.
    with tf.device(HOST), tables_without_values():
        model = built_model(task, options.precision)
    dataset = as_batches(task.dataset("train", InputShard()))
    may_be_empty = workers_per_batch > 1 or options.accumulation > 1
    return WorkerEngine(
        task,
        model,
        devices,
        options,
        Lookups(model, open_length(dataset.element_spec)),
        shares=shares,
        num_servers=len(membership.servers),
        num_sharing=workers_per_batch,
        sends_sums=membership.options.is_sync,
        stand_in=_first_example(dataset) if may_be_empty else None,
        wire_precision=membership.options.wire_precision,
    )


def _first_example(dataset) -> Batch:
    with readable_input("train", "its first batch"):
        first = next(iter(dataset))
    return tf.nest.map_structure(lambda tensor: tensor[:1], first)
