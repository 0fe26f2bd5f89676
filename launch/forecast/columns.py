"""The modes side by side: bytes a device of each. To add a mode: write its function, add it to `MODES`.

A column is read off the graph that the mode runs, or computed from such a column by a formula.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from strategies.registry import build_strategy
from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.memory.engine_memory import EngineMemory, StepMemory
from towers.memory.zero import BytesPerParameter, model_states
from towers.options import StepOptions
from towers.task import Task

GRAPH, ARITHMETIC = "graph", "arithmetic"


@dataclasses.dataclass(frozen=True)
class Column:
    """A mode's memory.

    Attributes:
      name: the mode.
      basis: GRAPH if it is read off the mode's graph, ARITHMETIC if a formula made it from another column.
      device: the fullest device.
      process: the whole process if its towers are on CPUs, which share a memory; else None.
    """

    name: str
    basis: str
    device: StepMemory
    process: StepMemory | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """What is to be trained, for the functions of `MODES`.

    Attributes:
      task: gives model and batch.
      devices: all towers.
      options: how a step computes.
      num_workers: processes of a ring, and workers of parameter servers.
      num_servers: parameter servers.
    """

    task: Task
    devices: Devices
    options: StepOptions
    num_workers: int = 2
    num_servers: int = 1

    @functools.cache  # noqa: B019  a run lives as long as the program
    def strategy(self, num_towers: int, *, sharded: bool) -> SynchronousStrategy:
        """The strategy 'towers' on the first towers."""
        towers = self.devices.towers[:num_towers]
        devices = dataclasses.replace(self.devices, towers=towers, groups=(), sharded=sharded)
        return build_strategy("towers", self.task, devices, self.options, shares=(1.0,) * num_towers)

    @functools.cache  # noqa: B019
    def memory(self, num_towers: int, *, sharded: bool) -> EngineMemory:
        """The memory of the strategy 'towers' on the first towers."""
        return EngineMemory(self.strategy(num_towers, sharded=sharded).engine)

    @property
    def num_towers(self) -> int:
        return self.devices.num_towers

    @property
    def parameters(self) -> Mapping[str, tf.Variable]:
        """The model's parameters by name."""
        return self.strategy(1, sharded=False).engine.parameters()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(variable.shape.num_elements() for variable in self.parameters.values())

    @property
    def bytes_per_parameter(self) -> BytesPerParameter:
        """What each costs: itself, its gradient and its slots, in the first one's format."""
        item = next(iter(self.parameters.values())).dtype.size
        return BytesPerParameter(item, item, item * len(self.options.rule.slot_names))

    def process_or_gpu(self, num_towers: int, length: int, *, sharded: bool = False) -> StepMemory:
        """What a batch has to fit: the process's memory if its towers are on CPUs, else the fullest GPU's."""
        memory = self.memory(num_towers, sharded=sharded)
        if self.devices.on_cpu:
            return memory.in_all(length)
        return max(memory.by_device(length).values(), key=lambda one: one.total_bytes)

    def of_towers(self, name: str, num_towers: int, *, sharded: bool = False) -> Column:
        """The column of a mode of this process."""
        memory = self.memory(num_towers, sharded=sharded)
        of_devices = memory.by_device(self.task.batch_size).values()
        device = max(of_devices, key=lambda one: one.total_bytes)
        process = memory.in_all(self.task.batch_size) if self.devices.on_cpu else None
        return Column(name, GRAPH, device, process)


def one_tower(run: Run) -> list[Column]:
    """One device."""
    return [run.of_towers("1 tower", 1)]


def central_towers(run: Run) -> list[Column]:
    """Parameters on one device, towers on all."""
    return [run.of_towers(f"{run.num_towers} towers", run.num_towers)] if run.num_towers > 1 else []


def sharded_towers(run: Run) -> list[Column]:
    """An owner for each parameter."""
    name = f"{run.num_towers} towers, sharded"
    return [run.of_towers(name, run.num_towers, sharded=True)] if run.num_towers > 1 else []


def ring(run: Run) -> list[Column]:
    """A worker: its towers on its part of the batch; gradients packed to vectors, and the vectors' sums."""
    part = math.ceil(run.task.batch_size / run.num_workers)
    own = run.process_or_gpu(run.num_towers, part)
    worker = dataclasses.replace(own, collectives_bytes=2 * own.parameters_bytes)
    return [Column(f"ring, 1 of {run.num_workers} workers", ARITHMETIC, worker)]


def parameter_servers(run: Run) -> list[Column]:
    """An asynchronous worker computes a whole batch from a pulled vector; a server has a piece and its slots.

    A worker has the pulled vector beside the parameters that it is cut into, and its gradient as a vector. A
    server may hold a gradient of each worker.
    """
    own = run.process_or_gpu(run.num_towers, run.task.batch_size)
    parameters = own.parameters_bytes
    worker = dataclasses.replace(own, optimizer_bytes=0, collectives_bytes=2 * parameters)
    server = StepMemory(
        parameters_bytes=parameters / run.num_servers,
        optimizer_bytes=own.optimizer_bytes / run.num_servers,
        gradients_bytes=run.num_workers * parameters / run.num_servers,
    )
    return [
        Column("ps, worker", ARITHMETIC, worker),
        Column(f"ps, 1 of {run.num_servers} servers", ARITHMETIC, server),
    ]


def zero_stages(run: Run) -> list[Column]:
    """ZeRO's formulas over the towers: model states by `towers.memory.zero`, the rest as of one of several towers.

    What it exchanges: a gradient on its way to its owner (stages 1 and 2); two gathered layers (3).
    """
    count = max(2, run.num_towers)
    own = run.process_or_gpu(1, math.ceil(run.task.batch_size / count))
    layers, each = layer_bytes(run.parameters), run.bytes_per_parameter
    found = []
    for zero in (1, 2, 3):
        states = model_states(run.num_parameters, count, zero=zero, each=each)
        exchanged = sum(layers[:2]) if zero == 3 else layers[0]
        column = dataclasses.replace(
            own,
            parameters_bytes=states.parameters_bytes,
            gradients_bytes=states.gradients_bytes,
            optimizer_bytes=states.optimizer_bytes,
            collectives_bytes=exchanged,
        )
        found.append(Column(f"ZeRO-{zero}, 1 of {count}", ARITHMETIC, column))
    return found


def layer_bytes(parameters: Mapping[str, tf.Variable]) -> list[int]:
    """Bytes of each layer's parameters, the largest first; a layer is what its parameters' paths begin with."""
    found: dict[str, int] = {}
    for path, variable in parameters.items():
        layer = path.rpartition("/")[0]
        found[layer] = found.get(layer, 0) + variable.dtype.size * variable.shape.num_elements()
    return sorted(found.values(), reverse=True)


MODES: Sequence[Callable[[Run], list[Column]]] = (
    one_tower,
    central_towers,
    sharded_towers,
    ring,
    parameter_servers,
    zero_stages,
)
