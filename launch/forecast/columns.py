"""The modes side by side: bytes a device of each. To add a mode: write its function, add it to `MODES`.

A column is read off the graph that the mode runs, or computed from such a column by a formula.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from launch.forecast.modes_of_a_process import BRANCHES, PIPELINE, SLICES, ProcessMode, ProcessModes, all_devices
from launch.messages.in_flags import in_flags
from strategies.ring.exchange.collectives import WireOptions
from strategies.servers.checks import check_model, check_options
from strategies.servers.options import ServersOptions
from towers.errors import UserError
from towers.memory.engine_memory import StepMemory
from towers.memory.zero import BytesPerParameter, model_states

GRAPH, ARITHMETIC = "graph", "arithmetic"


@dataclasses.dataclass(frozen=True)
class Column:
    """A mode's memory.

    Attributes:
      name: the mode.
      basis: GRAPH if it is read off the mode's graph, ARITHMETIC if a formula made it from another column.
      device: the fullest device, or the one that the name says.
      process: the whole process if its towers are on CPUs, which share a memory; else None.
      mode: what a process runs for it, if it is to be measured.
    """

    name: str
    basis: str
    device: StepMemory
    process: StepMemory | None = None
    mode: ProcessMode | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """What is to be trained, for the functions of `MODES`.

    Attributes:
      modes: task, devices and options, and the modes of one process.
      num_workers: processes of a ring, and workers of parameter servers.
      num_servers: parameter servers.
      servers: how these work.
    """

    modes: ProcessModes
    num_workers: int = 2
    num_servers: int = 1
    servers: ServersOptions = dataclasses.field(default_factory=ServersOptions)

    @property
    def batch_size(self) -> int:
        return self.modes.task.batch_size

    @property
    def num_towers(self) -> int:
        """Towers if each device of the process is one."""
        return len(all_devices(self.modes.devices))

    @property
    def one(self) -> ProcessMode:
        """One tower."""
        return ProcessMode(name="1 tower", num_devices=1)

    @property
    def central(self) -> ProcessMode:
        """A tower on each device, parameters on one."""
        name = self.one.name if self.num_towers == 1 else f"{self.num_towers} towers"
        return ProcessMode(name=name, num_devices=self.num_towers)

    @functools.cached_property
    def parameters(self) -> Mapping[str, tf.Variable]:
        """The model's parameters by name."""
        return self.modes.strategy(self.one).engine.parameters()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(variable.shape.num_elements() for variable in self.parameters.values())

    @property
    def bytes_per_parameter(self) -> BytesPerParameter:
        """What each costs: itself, its gradient and its slots, in the first one's format."""
        item = next(iter(self.parameters.values())).dtype.size
        return BytesPerParameter(item, item, item * len(self.modes.options.rule.slot_names))

    def of_process(self, mode: ProcessMode) -> Column:
        """The column of a mode of this process: its fullest device."""
        device = max(self._by_device(mode).values(), key=lambda one: one.total_bytes)
        return Column(mode.name, GRAPH, device, self._in_all(mode), mode)

    def of_each_device(self, mode: ProcessMode, device_name: str) -> list[Column]:
        """A column for each device of a mode of this process; the first one has the process too."""
        by_device = self._by_device(mode)
        names = [name.removeprefix("/device:") for name in all_devices(mode.devices(self.modes.devices))]
        found = [
            Column(f"{mode.name}, {device_name} {index}", GRAPH, by_device[name])
            for index, name in enumerate(names)
        ]
        return [dataclasses.replace(found[0], process=self._in_all(mode), mode=mode), *found[1:]]

    def _by_device(self, mode: ProcessMode) -> dict[str, StepMemory]:
        return self.modes.memory(mode).by_device(self.batch_size)

    def _in_all(self, mode: ProcessMode) -> StepMemory | None:
        return self.modes.memory(mode).in_all(self.batch_size) if self.modes.devices.on_cpu else None


def one_tower(run: Run) -> Iterator[Column]:
    """One device."""
    yield run.of_process(run.one)


def central_towers(run: Run) -> Iterator[Column]:
    """Parameters on one device, towers on all."""
    if run.num_towers > 1:
        yield run.of_process(run.central)


def sharded_towers(run: Run) -> Iterator[Column]:
    """An owner for each parameter."""
    if run.num_towers > 1:
        name = f"{run.num_towers} towers, sharded"
        yield run.of_process(dataclasses.replace(run.central, name=name, sharded=True))


def replicated_towers(run: Run) -> Iterator[Column]:
    """A copy of all parameters and of the optimizer state on each device."""
    if run.num_towers > 1:
        name = f"{run.num_towers} towers, replicated"
        yield run.of_process(dataclasses.replace(run.central, name=name, replicated=True))


def zero_stages(run: Run) -> Iterator[Column]:
    """ZeRO over the towers; with one tower its formulas for two devices.

    The formulas: model states by `towers.memory.zero`, the rest as of one tower. What it exchanges: a gradient on
    its way to its owner (stages 1 and 2); two gathered layers (3).
    """
    if run.num_towers > 1:
        for zero in (1, 2, 3):
            name = f"{run.num_towers} towers, ZeRO-{zero}"
            yield run.of_process(dataclasses.replace(run.central, name=name, zero=zero))
        return
    own = run.modes.process_or_gpu(run.one, math.ceil(run.batch_size / 2))
    for zero in (1, 2, 3):
        yield Column(f"ZeRO-{zero}, 1 of 2", ARITHMETIC, _with_zero(run, own, 2, zero=zero))


def recomputed_blocks(run: Run) -> Iterator[Column]:
    """The towers with activations of repeated blocks computed again."""
    yield from _recomputed(run, "blocks")


def recomputed_fully(run: Run) -> Iterator[Column]:
    """The towers with activations of all parts computed again."""
    yield from _recomputed(run, "full")


def _recomputed(run: Run, recompute: str) -> Iterator[Column]:
    if run.modes.options.recompute == "none":
        name = f"{run.central.name}, recompute={recompute}"
        yield run.of_process(dataclasses.replace(run.central, name=name, recompute=recompute))


def pipeline(run: Run) -> Iterator[Column]:
    """One tower over all devices, a column for each stage's device."""
    if run.num_towers > 1:
        mode = dataclasses.replace(run.central, name="pipeline", strategy=PIPELINE)
        yield from run.of_each_device(mode, "device")


def slices(run: Run) -> Iterator[Column]:
    """One tower whose layers are divided over all devices."""
    if run.num_towers > 1:
        yield run.of_process(dataclasses.replace(run.central, name=f"{run.num_towers} slices", strategy=SLICES))


def branches(run: Run) -> Iterator[Column]:
    """One tower whose branches are divided over all devices."""
    if run.num_towers > 1:
        mode = dataclasses.replace(run.central, name="branches", strategy=BRANCHES)
        yield from run.of_each_device(mode, "device")


def ring(run: Run) -> Iterator[Column]:
    """A worker: its towers on its part of the batch, and what is exchanged when the backward pass needs the most.

    Gradients are exchanged pack by pack as they become ready: all of them summed, and one pack as a vector too.
    With ZeRO-1 it has a part of the optimizer state, and gets the sums of that part. When the gradients are gone,
    it sends its part of the parameters and gets all of them as vectors: more only where the batch is small.
    """
    own = run.modes.process_or_gpu(run.central, math.ceil(run.batch_size / run.num_workers))
    parameters, part = own.parameters_bytes, 1 / run.num_workers
    pack = min(parameters, WireOptions().pack_bytes(run.num_workers))
    worker = dataclasses.replace(own, collectives_bytes=parameters + pack)
    yield Column(f"ring, 1 of {run.num_workers} workers", ARITHMETIC, worker)
    gathered = parameters * (1 + part) - own.gradients_bytes - own.activations_bytes
    worker = dataclasses.replace(
        own, optimizer_bytes=own.optimizer_bytes * part, collectives_bytes=max(parameters * part, gathered)
    )
    yield Column(f"ring, ZeRO-1, 1 of {run.num_workers} workers", ARITHMETIC, worker)


def ring_zero_3(run: Run) -> Iterator[Column]:
    """A worker with its part of all states, and four layers: two gathered, two sent to owners.

    The latter are a gradient, summed over the towers, and the vector that is sent. Each of several towers has its
    own gradient besides. The model's first values are freed.
    """
    own = run.modes.process_or_gpu(run.central, math.ceil(run.batch_size / run.num_workers))
    if run.modes.devices.on_cpu:
        template = run.modes.memory(run.central).template_bytes
        own = dataclasses.replace(own, buffers_bytes=own.buffers_bytes - template)
    worker = _with_zero(run, own, run.num_workers, zero=3)
    of_towers = layer_bytes(run.parameters)[0] * run.num_towers if run.num_towers > 1 else 0
    worker = dataclasses.replace(worker, collectives_bytes=2 * worker.collectives_bytes + of_towers)
    yield Column(f"ring, ZeRO-3, 1 of {run.num_workers} workers", ARITHMETIC, worker)


def _with_zero(run: Run, own: StepMemory, count: int, *, zero: int) -> StepMemory:
    """A device's memory with its part of the states, and what it exchanges at a time."""
    layers = layer_bytes(run.parameters)
    states = model_states(run.num_parameters, count, zero=zero, each=run.bytes_per_parameter)
    return dataclasses.replace(
        own,
        parameters_bytes=states.parameters_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        collectives_bytes=sum(layers[:2]) if zero == 3 else layers[0],
    )


def parameter_servers(run: Run) -> Iterator[Column]:
    """An asynchronous worker computes a whole batch from a pulled vector; a server has a piece and its slots.

    A worker has the pulled vector beside the parameters that it is cut into, and its gradient as a vector. A
    server may hold a gradient of each worker, and a copy of the one that it applies.
    """
    check_options(run.modes.options, run.servers, run.num_workers)
    check_model(run.modes.strategy(run.central), run.servers, run.num_workers)
    own = run.modes.process_or_gpu(run.central, run.batch_size)
    parameters = own.parameters_bytes
    worker = dataclasses.replace(own, optimizer_bytes=0, collectives_bytes=2 * parameters)
    server = StepMemory(
        parameters_bytes=parameters / run.num_servers,
        optimizer_bytes=own.optimizer_bytes / run.num_servers,
        gradients_bytes=(run.num_workers + 1) * parameters / run.num_servers,
    )
    yield Column("ps, worker", ARITHMETIC, worker)
    yield Column(f"ps, 1 of {run.num_servers} servers", ARITHMETIC, server)


def layer_bytes(parameters: Mapping[str, tf.Variable]) -> list[int]:
    """Bytes of each layer's parameters, the largest first; a layer is what its parameters' paths begin with."""
    found: dict[str, int] = {}
    for path, variable in parameters.items():
        layer = path.rpartition("/")[0]
        found[layer] = found.get(layer, 0) + variable.dtype.size * variable.shape.num_elements()
    return sorted(found.values(), reverse=True)


MODES: Sequence[Callable[[Run], Iterator[Column]]] = (
    one_tower,
    central_towers,
    sharded_towers,
    replicated_towers,
    zero_stages,
    recomputed_blocks,
    recomputed_fully,
    pipeline,
    slices,
    branches,
    ring,
    ring_zero_3,
    parameter_servers,
)


def columns_of(run: Run, show: Callable[[str], None] = lambda mode: None) -> tuple[list[Column], list[str]]:
    """All columns, and a line for each mode that refuses the model, the batch or an option.

    Args:
      run: what is to be trained.
      show: called with the name of each mode before it is traced, which may take a minute.

    Raises:
      UserError: one tower refuses it too.
    """
    found: list[Column] = []
    refusals = []
    for mode in MODES:
        name = mode.__name__.replace("_", " ")
        show(name)
        try:
            found += mode(run)
        except UserError as error:
            if mode is one_tower:
                raise
            refusals.append(f"no figures for {name}: {in_flags(str(error))}")
    return found, refusals
