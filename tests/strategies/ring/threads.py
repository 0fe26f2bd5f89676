"""Workers of a ring in threads of this process, with real connections to their neighbours."""

import contextlib
import functools
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from strategies.grouped_towers import GroupedTowers
from strategies.ring.engine import RingEngine
from strategies.ring.exchange.collectives import HostExchange, WireOptions, WorkerExchange
from strategies.ring.exchange.neighbours import Neighbours
from strategies.ring.exchange.tcp_ring import TcpRing
from strategies.ring.placements import ring_placement
from strategies.ring.zero.gathered_towers import gathered_towers
from strategies.ring.zero.worker_units import WorkerUnits
from tests.towers.logical_cpus import cpus
from towers.devices import Devices
from towers.gathering.gathered_once import GatheredGraph
from towers.input.tower_parts import TowerParts, open_length
from towers.layers.names import fresh_name_counts
from towers.options import StepOptions
from towers.precision import layer_precision
from towers.split import boundaries, even_shares
from towers.task import InputShard, Task, batch_length
from towers.tower import ModelVariables

LIMIT_SECONDS = 60
T, Result = TypeVar("T"), TypeVar("Result")


@contextlib.contextmanager
def rings(num_workers: int, check: Callable[[int], None] = lambda rank: None, timeout_seconds: float = 20.0):
    """Context manager: yields one ring for each rank, and the connections from each rank to the next."""
    connections = [connection() for _ in range(num_workers)]
    made = [
        TcpRing(
            Neighbours(
                rank,
                num_workers,
                connections[rank][0],
                connections[rank - 1][1],
                timeout_seconds=timeout_seconds,
                check=check,
            )
        )
        for rank in range(num_workers)
    ]
    try:
        yield made, connections
    finally:
        for ends in connections:
            for end in ends:
                end.close()


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begins = socket.create_connection(listener.getsockname())
        return begins, listener.accept()[0]


def at_once(made: Sequence[T], call: Callable[[T, int], Result]) -> list[Result]:
    """The results of `call(one, rank)` for each rank's element of `made`, all at the same time."""
    found: list = [None] * len(made)

    def of(rank: int) -> None:
        found[rank] = call(made[rank], rank)

    threads = [threading.Thread(target=of, args=(rank,), daemon=True) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()
    return found


class WorkersInThreads:
    """Our own engine on some workers, each with an even part of the batch.

    Attributes:
      engines, hosts: the engine and the host's exchange of each rank.
      graphs: with stage 3 of ZeRO, each worker's graph of a tower.
    """

    def __init__(
        self,
        made: Sequence[TcpRing],
        task: Task,
        options: StepOptions,
        *,
        zero: int = 0,
        devices: Devices | Sequence[Devices] | None = None,
        make_towers: Callable[[Task, Devices, StepOptions], GroupedTowers] | None = None,
    ):
        """Args:
        made: the connections of each rank.
        task: task whose first training batch is used in each step.
        options: options of the step.
        zero: the stage of ZeRO; 0 for none.
        devices: devices of each worker, or by rank; None for one CPU.
        make_towers: makes the towers of a worker if each is several devices.
        """
        count = len(made)
        with layer_precision(options.precision), fresh_name_counts():
            keras.utils.set_random_seed(options.seed)
            model = task.build_model()
        batch = next(iter(task.dataset("train", InputShard())))
        ends = boundaries(int(batch_length(batch)), even_shares(count))
        self._parts = [
            tf.nest.map_structure(lambda leaf, part=slice(*part): leaf[part], batch)
            for part in itertools.pairwise(ends)
        ]
        # Several packs, each with a few parameters.
        wire = WireOptions(bytes_per_pack=600)
        self.hosts = [HostExchange(count, rank, wire, channel=1, tcp=made[rank]) for rank in range(count)]
        self.engines = []
        given = devices or cpus(1, zero=zero)
        by_rank = [given] * count if isinstance(given, Devices) else given
        num_towers = [devices.num_towers for devices in by_rank]
        for rank, (tcp, devices) in enumerate(zip(made, by_rank, strict=True)):
            exchange = WorkerExchange(count, rank, wire, channel=2, tcp=tcp)
            shares = even_shares(num_towers[rank])
            first, every = sum(num_towers[:rank]), even_shares(sum(num_towers))
            parts = TowerParts(shares=shares, all_shares=every, first_tower=first)
            towers = make_towers and make_towers(task, devices, options)
            more = {}
            units = None
            if towers is not None:
                towers.divide(model)
            if devices.zero == 3:
                variables = ModelVariables.of(model)
                shards = towers and towers.shards(variables)
                units = WorkerUnits(variables, options.rule, exchange, shards)
            if towers is not None:
                make = functools.partial(towers.make_towers, exchange=units)
                more = {"make_towers": make, "microbatches": towers.microbatches}
            elif units is not None:
                more = gathered_towers(devices, units)
            engine = RingEngine(
                task,
                model,
                devices,
                options,
                batch_spec=open_length(tf.nest.map_structure(tf.type_spec_from_value, batch)),
                parts=parts,
                exchange=exchange,
                place=ring_placement(devices, exchange, towers, units),
                **more,
            )
            # Traced here, because Keras traces in one thread only.
            engine.train_function.get_concrete_function()
            self.engines.append(engine)

    @property
    def graphs(self) -> list[GatheredGraph]:
        return [graph for engine in self.engines for graph in engine.towers[0].traced.graphs.values()]

    def train(self, num_steps: int, rate: float = 0.1) -> None:
        """Trains some steps on all workers at the same time."""

        def steps(engine: RingEngine, rank: int) -> None:
            for _ in range(num_steps):
                engine.train(self._parts[rank], rate)
            tf.nest.map_structure(lambda variable: variable.numpy(), engine.counters.variables())

        at_once(self.engines, steps)
