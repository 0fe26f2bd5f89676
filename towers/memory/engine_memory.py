"""The memory that a step of a one-process engine needs, computed from the step's graph."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import tensorflow as tf

from towers.engine import Engine
from towers.hardware.cores import num_cores
from towers.memory.graph_operations import HOST_MEMORY
from towers.memory.lifetimes import Peak, peaks
from towers.memory.step_graph import StepGraph
from towers.memory.tensor_kinds import ACTIVATIONS, GRADIENTS
from towers.parameters.copied_variable import CopiedVariable
from towers.parameters.sliced_variable import SlicedVariable

# Number of orders of a step's operations whose largest peak counts: a single order missed workspaces that two
# threads need at once (22% of the peak of classic_cnn in a pipeline, without oneDNN). With 65 orders the peaks of
# traced steps, ten of each mode, were predicted no better, and those of pipelines 9% too high. Larger delays
# (standard deviation 1.5 to 3) mostly found lower peaks; random choices among ready operations were 24% too high
# for recomputing transformers.
_NUM_ORDERS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one memory at the moment of a step when most bytes are live.

    Attributes:
      parameters_bytes, optimizer_bytes: the variables.
      gradients_bytes: gradients and their sums, and all else that depends on the batch's values but not on its
        length.
      activations_bytes: all that grows with the batch: what the backward pass needs, and its own results.
      buffers_bytes: the batch, batch statistics, constants, converted parameters, workspace of kernels, and on the
        host the initial values of the model that the engine was built from.
      collectives_bytes: what an exchange with other processes needs.
    """

    parameters_bytes: float = 0
    gradients_bytes: float = 0
    optimizer_bytes: float = 0
    activations_bytes: float = 0
    buffers_bytes: float = 0
    collectives_bytes: float = 0

    @property
    def total_bytes(self) -> float:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Held:
    """Bytes of a memory that are held throughout a step."""

    parameters_bytes: int = 0
    optimizer_bytes: int = 0
    state_bytes: int = 0


class EngineMemory:
    """Predicts the memory of a training step for batches of any length. It traces the step without running it.

    Attributes:
      template_bytes: values of the engine's Keras model, which training leaves unchanged.
    """

    def __init__(self, engine: Engine):
        """Args:
        engine: trains in one process; all its variables exist.
        """
        functions = [engine.train_function]
        if engine.options.accumulation > 1:
            functions = [engine.first_function, engine.apply_function]
        concretes = [function.get_concrete_function() for function in functions]
        threads = engine.devices.threads_per_tower or num_cores()
        self._graphs = [StepGraph(concrete, kernel_threads=threads) for concrete in concretes]
        # The sums of the microbatches so far: every call takes them, and returns new ones.
        self._sums_bytes = sum(map(_bytes_of, concretes[0].outputs)) if len(concretes) > 1 else 0
        self._placement = engine.placement
        described = engine.tower.variables
        self.template_bytes = sum(_bytes_of(one.value) for one in (*described.parameters, *described.state))

    def in_all(self, length: int) -> StepMemory:
        """The process's memory if all its towers are on CPUs.

        Args:
          length: examples of a global batch.
        """
        return self._at_peak(self._held(lambda device: HOST_MEMORY), length, one_memory=True)[HOST_MEMORY]

    def by_device(self, length: int) -> dict[str, StepMemory]:
        """What each device holds, by name ('CPU:1'); each has its peak at another moment.

        Args:
          length: examples of a global batch.
        """
        return self._at_peak(self._held(_short), length, one_memory=False)

    def passing_bytes(self, length: int) -> int:
        """Most bytes that a step of a process on CPUs allocates besides what it holds before."""
        return max(peak.total_bytes - peak.kinds.get("batch", 0) for peak in self._peaks(length, one_memory=True))

    def _peaks(self, length: int, *, one_memory: bool) -> Iterator[Peak]:
        for graph in self._graphs:
            yield from _peaks_of(graph, length, one_memory=one_memory).values()

    def _at_peak(self, held: Mapping[str, _Held], length: int, *, one_memory: bool) -> dict[str, StepMemory]:
        found: dict[str, StepMemory] = {}
        for graph in self._graphs:
            of_graph = _peaks_of(graph, length, one_memory=one_memory)
            for memory in {*held, *of_graph}:
                at_home = memory == HOST_MEMORY
                now = _step_memory(
                    of_graph.get(memory, Peak()),
                    held.get(memory, _Held()),
                    constant_bytes=graph.constant_bytes if at_home else 0,
                    sums_bytes=self._sums_bytes if at_home else 0,
                )
                if memory not in found or now.total_bytes > found[memory].total_bytes:
                    found[memory] = now
        return found

    def _held(self, memory_of) -> dict[str, _Held]:
        placement = self._placement
        slots = [variable for of_slot in placement.slots.values() for variable in of_slot.values()]
        kinds = {
            "parameters_bytes": _by_memory(placement.parameters.values(), memory_of),
            "optimizer_bytes": _by_memory(slots, memory_of),
            "state_bytes": _by_memory(placement.state.values(), memory_of),
        }
        of_host = kinds["state_bytes"]
        of_host[HOST_MEMORY] = of_host.get(HOST_MEMORY, 0) + self.template_bytes
        memories = {memory for of_kind in kinds.values() for memory in of_kind}
        return {
            memory: _Held(**{kind: of_kind.get(memory, 0) for kind, of_kind in kinds.items()})
            for memory in memories
        }


def _peaks_of(graph: StepGraph, length: int, *, one_memory: bool) -> dict[str, Peak]:
    """The peaks over several likely orders, with as many operations at once as `towers.device_setup` sets."""
    return peaks(graph.operations(length, one_memory=one_memory), max(2, num_cores()), _NUM_ORDERS)


def _step_memory(peak: Peak, held: _Held, *, constant_bytes: int, sums_bytes: int) -> StepMemory:
    passing = dict(peak.kinds)
    return StepMemory(
        parameters_bytes=held.parameters_bytes,
        optimizer_bytes=held.optimizer_bytes,
        gradients_bytes=passing.pop(GRADIENTS, 0) + sums_bytes,
        activations_bytes=passing.pop(ACTIVATIONS, 0),
        buffers_bytes=sum(passing.values()) + held.state_bytes + constant_bytes,
    )


def _by_memory(variables: Iterable, memory_of) -> dict[str, int]:
    found: dict[str, int] = {}
    for variable in variables:
        for part in _parts_of(variable):
            memory = memory_of(part.device)
            found[memory] = found.get(memory, 0) + _bytes_of(part)
    return found


def _parts_of(variable) -> list[tf.Variable]:
    """The variables of slices and copies."""
    if isinstance(variable, SlicedVariable | CopiedVariable):
        parts = variable.parts if isinstance(variable, SlicedVariable) else variable.copies
        return [inner for part in parts for inner in _parts_of(part)]
    return [variable]


def _short(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def _bytes_of(value) -> int:
    return value.dtype.size * (value.shape.num_elements() or 0)
