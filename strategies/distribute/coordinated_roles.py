"""The chief, a server and a worker of ParameterServerStrategy, each from start to end."""

import dataclasses
import json
from collections.abc import Callable, Mapping

from strategies.cluster import CHIEF, SERVER, WORKER, Cluster
from strategies.distribute.claims import Claims
from strategies.distribute.coordinated_carrier import CoordinatedCarrier
from strategies.distribute.coordinator_connection import CoordinatorConnection
from strategies.distribute.first_server import functions
from strategies.distribute.frozen_weights import KeptWeights
from strategies.distribute.helping_process import HelpingProcess
from strategies.distribute.own_batches import OwnBatches
from strategies.run_settings import check_same
from strategies.servers.checks import check_options
from strategies.servers.chief import ServersStrategy
from strategies.servers.membership import ServersMembership
from strategies.servers.server_memory import free_bytes
from strategies.servers.worker_graph import WorkerGraph
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task
from towers.updates.sparse_updates import LAZY


def joined(cluster: Cluster, *, num_cpus: int, startup_timeout_seconds: float) -> object:
    """Joins the cluster; returns this process's part. Call it once, before TensorFlow computes anything.

    Args:
      cluster: all processes, and which of them this one is.
      num_cpus: number of logical CPU devices that this process offers.
      startup_timeout_seconds: seconds to wait for the other processes.

    Raises:
      UserError: this process's address is in use.
      PeerLost: a process did not start in time; the message names it.
    """
    if cluster.role == CHIEF:
        return CoordinatorConnection(cluster, startup_timeout_seconds=startup_timeout_seconds)
    return HelpingProcess(cluster, num_cpus=num_cpus, startup_timeout_seconds=startup_timeout_seconds)


def coordinated_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares=None, servers: ServersMembership
) -> ServersStrategy:
    """The strategy 'ps' on TensorFlow's engine, for the chief.

    Args:
      task, devices, options, shares: as for `strategies.towers.towers_strategy`.
      servers: the cluster and the chief's membership.

    Raises:
      UserError: an option is not supported by servers, or a process was started with other settings.
      PeerLost: a process could not be reached.
    """
    check_options(options, servers.options, servers.num_workers)
    devices = dataclasses.replace(devices, compiles_kernels=False)
    connection = servers.joined
    with connection.telling_all():
        described = connection.descriptions(servers.startup_timeout_seconds)
        _check_alike(described, servers.settings_with(task, options), servers.settings(options))
        of_workers = _devices_of_workers(described)

    def make_carrier(strategy: ServersStrategy) -> CoordinatedCarrier:
        graph = WorkerGraph(
            task,
            strategy.model,
            of_workers,
            options,
            strategy.lookups,
            shares=shares,
            num_servers=len(servers.servers),
            num_sharing=1,
            sends_sums=False,
            stand_in=None,
            wire_precision=servers.options.wire_precision,
        )
        _check_collectives(graph, servers)
        return CoordinatedCarrier(
            connection,
            graph,
            strategy.batch_spec,
            schedule=options.rate,
            rule=options.rule,
            free_bytes={name: one["free_bytes"] for name, one in described.items() if "free_bytes" in one},
            stops_if_bad=options.on_nan == "stop",
            lazily=servers.options.sparse_updates == LAZY,
            steps_per_closure=servers.options.steps_per_closure,
            worker_timeout_seconds=servers.options.worker_timeout_seconds,
        )

    return ServersStrategy(
        task,
        devices,
        options,
        shares,
        make_carrier=make_carrier,
        servers=servers.options,
        num_workers=servers.num_workers,
        num_servers=len(servers.servers),
        startup_timeout_seconds=servers.startup_timeout_seconds,
    )


def run_coordinated_server(
    options: StepOptions, membership: ServersMembership, *, stop_asked: Callable[[], bool] = lambda: False
) -> str:
    """Serves until the chief ends the run; returns how the run ended: 'done' or 'interrupted'.

    Args:
      options, membership: how a step is computed, and this server's membership.
      stop_asked: as for `HelpingProcess.run`.

    Raises:
      UserError: options that servers can't support, or the chief refused the run.
      PeerLost: the chief was lost.
    """
    check_options(options, membership.options, membership.num_workers)
    offered = functions(Claims()) if membership.cluster.index == 0 else {}
    return _helped(
        membership,
        {**offered, "stop_asked": lambda: json.dumps(stop_asked()).encode()},
        lambda: {"settings": membership.settings(options), "free_bytes": free_bytes()},
        stop_asked,
    )


def run_coordinated_worker(
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
      stop_asked: whether this process was asked to stop.
      before_step: called with the number of each step before it is computed.

    Raises:
      UserError: options that servers can't support, or the chief refused the run.
      PeerLost: the chief was lost.
    """
    check_options(options, membership.options, membership.num_workers)
    batches = OwnBatches(
        task,
        rank=membership.cluster.index,
        num_workers=membership.num_workers,
        stop_asked=stop_asked,
        before_step=before_step,
    )

    def describe() -> Mapping:
        return {
            "settings": membership.settings_with(task, options),
            "towers": list(devices.towers),
            "parameters": devices.parameters,
            "threads": devices.threads_per_tower,
            "instructions": sorted(devices.cpu_instructions),
        }

    offered = {"next_batch": batches.next_batch, **KeptWeights().functions()}
    return _helped(membership, offered, describe, stop_asked)


def _helped(membership: ServersMembership, offered, describe, stop_asked) -> str:
    seconds = membership.options.timeout_seconds
    return membership.joined.run(offered, describe, timeout_seconds=seconds, stop_asked=stop_asked)


def _check_alike(described: Mapping[str, Mapping], of_worker: Mapping, of_server: Mapping) -> None:
    """Raises UserError if a process was started with other settings than the chief."""
    for role, wanted in ((WORKER, of_worker), (SERVER, of_server)):
        found = {name: one["settings"] for name, one in described.items() if name.startswith(role)}
        check_same({"chief:0": wanted} | found)


def _check_collectives(graph: WorkerGraph, servers: ServersMembership) -> None:
    """Raises UserError if a step would run a collective more than once: a graph can't."""
    if graph.has_collectives and graph.options.accumulation > 1:
        raise UserError(
            f"accumulation={graph.options.accumulation} with batch_stats=synced and several towers: TensorFlow's "
            "engine computes a step as one graph, which can't repeat a collective; use batch_stats=average, one "
            "tower a worker, or engine='own'"
        )
    if graph.has_collectives and servers.options.steps_per_closure > 1:
        raise UserError(
            f"steps_per_closure={servers.options.steps_per_closure} with batch_stats=synced and several towers: a "
            "graph can't repeat a collective; use batch_stats=average or one tower a worker"
        )


def _devices_of_workers(described: Mapping[str, Mapping]) -> Devices:
    """The devices that every worker has, by names without the worker.

    One graph serves all workers, so it uses only instructions that all their CPUs have, and kernels for few
    threads only if no worker has more. It has no compiled kernels: the optimized tower calls them under the names
    of the traced functions, and ParameterServerStrategy's processes refuse a second function of the same name.
    With unique names a step runs, but an evaluation on the chief never ends (TensorFlow 2.21).

    Raises:
      UserError: workers have different devices.
    """
    found = {
        name: Devices(towers=tuple(one["towers"]), parameters=one["parameters"])
        for name, one in described.items()
        if name.startswith("worker")
    }
    (first, wanted), *others = found.items()
    for name, devices in others:
        if devices != wanted:
            raise UserError(
                f"{name} has towers on {', '.join(devices.towers)} and {first} on {', '.join(wanted.towers)}: one "
                "graph serves all workers; give all the same number of towers, or use engine='own'"
            )
    workers = [one for name, one in described.items() if name in found]
    return dataclasses.replace(
        wanted,
        threads_per_tower=max(one["threads"] for one in workers),
        cpu_instructions=frozenset.intersection(*(frozenset(one["instructions"]) for one in workers)),
        compiles_kernels=False,
    )
