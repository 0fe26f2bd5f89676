"""The life of every tensor of a graph, and the most bytes that live at once. Plain arithmetic, without TensorFlow.

    operation   reads   writes   live while it runs     live after it
    input               x        x                      x
    dense       x       y        x y                    x y            the backward pass still reads x
    relu        y       z        x z  (z in y's place)  x z            nothing else reads y
    gradient    x z     w        x z w                  w

A tensor lives from the operation that writes it until the last one that reads it has run. Operations run in the
order of `towers.memory.executor_order`. A thread takes longer for an operation of more bytes, so that independent
operations, such as those of two towers, run side by side. The peak depends on which operations run at the same
time, so it is the largest over several such orders. In the order of a traced step it is right within 0.05 MiB in
46 of 50 steps; which operations overlap is predicted only in part, because bytes stand for durations.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from towers.memory.executor_order import schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """A tensor that an operation writes.

    Attributes:
      num_bytes: its size.
      kind: what it is, for sums by kind.
      memory: the memory that it lies in.
      shares: index of the input whose buffer it always uses, as a reshape does; None for a buffer of its own.
      may_reuse: indices of the inputs whose buffer it takes over if the size is equal and nothing else will read
        it.
      is_kept: whether it lives to the end of the graph: a result, or a tensor that the caller holds.
    """

    num_bytes: int
    kind: str = ""
    memory: str = ""
    shares: int | None = None
    may_reuse: tuple[int, ...] = ()
    is_kept: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a graph.

    Attributes:
      name: its name.
      reads: the tensors that it reads, in order: (index of the operation that writes it, index of its output).
      after: indices of other operations that must have run before.
      outputs: the tensors that it writes.
      workspace_bytes: memory that it needs only while it runs.
      cost: how long it runs, in any unit.
      memory: the memory of its workspace.
      executor: the device that runs it.
      is_cheap: whether a thread runs it without putting it into a queue.
    """

    name: str
    outputs: tuple[Output, ...]
    reads: tuple[tuple[int, int], ...] = ()
    after: tuple[int, ...] = ()
    workspace_bytes: int = 0
    cost: float = 1.0
    memory: str = ""
    executor: str = ""
    is_cheap: bool = False


WORKSPACE = "workspace"


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which the most bytes of a memory are live.

    Attributes:
      total_bytes: all live tensors and the workspace.
      operation: name of the operation that runs then.
      kinds: bytes by kind of tensor; those of the workspace under `WORKSPACE`.
    """

    total_bytes: int = 0
    operation: str = ""
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)


def peaks(operations: Sequence[Operation], num_threads: int = 1, num_orders: int = 1) -> dict[str, Peak]:
    """The largest peak of each memory over several orders of the operations.

    Args:
      operations: operations of the graph.
      num_threads: number of operations that may run at once.
      num_orders: number of orders: first with the costs as given, then with varied costs. One thread has a single
        order.
    """
    found: dict[str, Peak] = {}
    for seed in range(num_orders if num_threads > 1 else 1):
        for memory, peak in _peaks_in_order(operations, num_threads, seed).items():
            if memory not in found or peak.total_bytes > found[memory].total_bytes:
                found[memory] = peak
    return found


def _peaks_in_order(operations: Sequence[Operation], num_threads: int, seed: int) -> dict[str, Peak]:
    alive = _Alive(operations)
    for index, is_end in schedule(operations, num_threads, seed=seed):
        if is_end:
            alive.end(index)
        else:
            alive.begin(index)
    return alive.peaks


class _Buffer:
    """Bytes in a memory that one or several tensors use."""

    def __init__(self, output: Output):
        self.num_bytes, self.kind, self.memory = output.num_bytes, output.kind, output.memory
        # Number of reads still to come, of any tensor in it.
        self.readers = 0


class _Alive:
    """The buffers that are live while operations run."""

    def __init__(self, operations: Sequence[Operation]):
        self._operations = operations
        self._readers = collections.Counter(tensor for one in operations for tensor in one.reads)
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._bytes: collections.defaultdict[str, collections.Counter] = collections.defaultdict(
            collections.Counter
        )
        self.peaks: dict[str, Peak] = {}

    def begin(self, index: int) -> None:
        """Adds an operation's outputs and its workspace, and notes the peak."""
        one = self._operations[index]
        read = [self._buffers[tensor] for tensor in one.reads]
        for position, output in enumerate(one.outputs):
            self._write((index, position), output, read, one.reads)
        self._bytes[one.memory][WORKSPACE] += one.workspace_bytes
        for memory in {one.memory, *(output.memory for output in one.outputs)}:
            self._note(memory, one.name)

    def end(self, index: int) -> None:
        """Frees an operation's workspace, and all buffers that nothing still reads."""
        one = self._operations[index]
        self._bytes[one.memory][WORKSPACE] -= one.workspace_bytes
        read = [self._buffers[tensor] for tensor in one.reads]
        for buffer in read:
            buffer.readers -= 1
        for buffer in [*read, *(self._buffers[index, position] for position in range(len(one.outputs)))]:
            self._free(buffer)

    def _write(
        self, tensor: tuple[int, int], output: Output, read: Sequence[_Buffer], reads: Sequence[tuple[int, int]]
    ) -> None:
        buffer = self._taken_over(output, read, reads)
        if buffer is None:
            buffer = _Buffer(output)
            self._bytes[buffer.memory][buffer.kind] += buffer.num_bytes
        elif buffer.kind != output.kind:
            self._bytes[buffer.memory][buffer.kind] -= buffer.num_bytes
            buffer.kind = output.kind if output.shares is None else buffer.kind
            self._bytes[buffer.memory][buffer.kind] += buffer.num_bytes
        buffer.readers += self._readers[tensor] + output.is_kept
        self._buffers[tensor] = buffer

    def _taken_over(
        self, output: Output, read: Sequence[_Buffer], reads: Sequence[tuple[int, int]]
    ) -> _Buffer | None:
        """The input's buffer that an output is written to; None for a new one.

        The buffer may be larger: the input may be a part of a buffer whose other parts nothing still reads.
        """
        if output.shares is not None:
            return read[output.shares]
        for position in output.may_reuse:
            buffer = read[position]
            is_last = buffer.readers == 1 and buffer.memory == output.memory
            source, number = reads[position]
            if is_last and self._operations[source].outputs[number].num_bytes == output.num_bytes > 0:
                return buffer
        return None

    def _note(self, memory: str, name: str) -> None:
        total = self._bytes[memory].total()
        if memory not in self.peaks or total > self.peaks[memory].total_bytes:
            kinds = {kind: count for kind, count in self._bytes[memory].items() if count}
            self.peaks[memory] = Peak(total, name, kinds)

    def _free(self, buffer: _Buffer) -> None:
        if buffer.readers == 0:
            buffer.readers = -1
            self._bytes[buffer.memory][buffer.kind] -= buffer.num_bytes
