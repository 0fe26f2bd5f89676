"""The modes side by side: bytes per device for each. To add a mode: write its function, add it to `MODES`.

A column is computed from the graph that the mode runs, or by a formula from another column.
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
      basis: GRAPH if computed from the mode's graph, ARITHMETIC if by a formula from another column.
      device: memory of the fullest device, or of the one in `name`.
      process: memory of the whole process if its towers are on CPUs; else None.
      mode: the mode to run in a process to measure this column; None if it can't be measured.
    """

    name: str
    basis: str
    device: StepMemory
    process: StepMemory | None = None
    mode: ProcessMode | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """The run to predict: the argument of the functions of `MODES`.

    Attributes:
      modes: task, devices and options, and the modes of one process.
      num_workers: processes of a ring, and workers of parameter servers.
      num_servers: parameter servers.
      servers: options of the parameter servers.
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
        """Number of towers if each device of the process is a tower."""
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
        """Number of elements of all parameters."""
        return sum(variable.shape.num_elements() for variable in self.parameters.values())

    @property
    def bytes_per_parameter(self) -> BytesPerParameter:
        """Bytes of a parameter's element, of its gradient and of its slots, in the first parameter's dtype."""
        item = next(iter(self.parameters.values())).dtype.size
        return BytesPerParameter(item, item, item * len(self.modes.options.rule.slot_names))

    def of_process(self, mode: ProcessMode) -> Column:
        """The column of a mode of this process: its fullest device."""
        device = max(self._by_device(mode).values(), key=lambda one: one.total_bytes)
        return Column(mode.name, GRAPH, device, self._in_all(mode), mode)

    def of_each_device(self, mode: ProcessMode, device_name: str) -> list[Column]:
        """A column for each device of a mode of this process; the first one also has the process's memory."""
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
    """One tower on one device."""
    yield run.of_process(run.one)


def central_towers(run: Run) -> Iterator[Column]:
    """Parameters on one device, towers on all."""
    if run.num_towers > 1:
        yield run.of_process(run.central)


def sharded_towers(run: Run) -> Iterator[Column]:
    """Towers with each parameter on its owner."""
    if run.num_towers > 1:
        name = f"{run.num_towers} towers, sharded"
        yield run.of_process(dataclasses.replace(run.central, name=name, sharded=True))


def replicated_towers(run: Run) -> Iterator[Column]:
    """A copy of all parameters and of the optimizer state on each device."""
    if run.num_towers > 1:
        name = f"{run.num_towers} towers, replicated"
        yield run.of_process(dataclasses.replace(run.central, name=name, replicated=True))


def zero_stages(run: Run) -> Iterator[Column]:
    """ZeRO over the towers, from their graphs; with one tower, by formulas for two devices.

    The formulas: model states by `towers.memory.zero`, the rest as for one tower. Exchanged at a time: a gradient
    on its way to its owner (stages 1 and 2); two gathered layers (stage 3).
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
    """The towers with recomputed activations in repeated blocks."""
    yield from _recomputed(run, "blocks")


def recomputed_fully(run: Run) -> Iterator[Column]:
    """The towers with recomputed activations in all parts."""
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
    """A worker: its towers on its part of the batch, and what it exchanges at the peak of the backward pass.

    Gradients are exchanged pack by pack as they become ready. So the worker holds the sums of all gradients, and
    one pack as a vector too. With ZeRO-1 it holds a part of the optimizer state, and the sums of that part. When
    the gradients are freed, it sends its part of the parameters and receives all of them as vectors, which takes
    more only if the batch is small.
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
    """A worker with its part of all states and, at a time, four layers: two gathered, two sent to owners.

    Those that are sent are a gradient, summed over the towers, and the vector that is sent. If there are several
    towers, each has its own gradient too. The model's first values are freed.
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
    """A device's memory with its part of the states, and with what it exchanges at a time."""
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
    """An asynchronous worker that computes a whole batch, and a server with a piece of the parameters and slots.

    A worker holds the parameters, the pulled vector that they are cut from, and its gradient as a vector. A server
    may hold a gradient of each worker, and a copy of the one that it applies.
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
    """Bytes of each layer's parameters, the largest first. A parameter's layer is its path up to the last '/'."""
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
      UserError: even one tower refuses the model, the batch or an option.
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
