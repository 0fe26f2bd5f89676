"""The operations of traced steps with their times and devices, from a trace of TensorFlow's profiler.

A trace has a line for each thread. On CPUs an operation is an event in it, inside the event of its function call;
an operation that finishes later (a collective, an arriving transfer) has an event for its start and one for its
end. The device of an operation is found in the graphs that TensorFlow ran, one for each device. The kernels of a
GPU have lines of their own.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from towers.timeline.activities import activity_of
from towers.tracing.flat_graph import node_of

# The event around each traced step, and its attribute with the number of the step.
STEP_EVENT, STEP_NUMBER = "towers_step", "step_num"
# TensorFlow's names of events and of their attributes.
_CALL, _STARTED, _DONE = (
    f"ExecutorState::{name}" for name in ("Process", "ProcessAsync::Start", "ProcessAsync::Done")
)
_READ = "EagerLocalExecute: IteratorGetNext"
_GPU_PLANE = re.compile(r"/device:(GPU:\d+)$")
_NAMED = re.compile(r"^([^:]+):\w+$")
# Suffixes of the types of operations that send and receive.
_SEND, _RECV = "Send", "Recv"
# Prefixes of the types of operations that wait for other processes.
_WAITING = ("Collective", "EagerPyFunc", "PyFunc")


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of time, in seconds of the trace's clock."""

    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class TracedOperation(Span):
    """An operation that ran.

    Attributes:
      name: its name in the graph that ran.
      device: its device, such as 'CPU:0'.
      waits: whether it waits for other processes: a collective, or a call of Python that sends and receives.
      arrival_seconds: when the last of its inputs that other activities compute had arrived; None if it has none.
      operation_type: its type, such as 'Conv2D'; '' for GPU kernels.
    """

    name: str
    device: str
    waits: bool = False
    arrival_seconds: float | None = None
    operation_type: str = ""


@dataclasses.dataclass(frozen=True)
class Transfer(Span):
    """The transfer of a tensor from the operation that computed it to the device that needs it.

    Attributes:
      name: name of the operation that computed it.
      source, target: devices.
    """

    name: str
    source: str
    target: str


@dataclasses.dataclass(frozen=True)
class TracedSteps:
    """The contents of a trace.

    Attributes:
      steps: the time span of each step, by its number.
      reads: the time spans in which the process waited for a batch.
      operations: all operations that ran in the graphs, sorted by start.
      transfers: all transfers between devices.
    """

    steps: Mapping[int, Span]
    reads: Sequence[Span]
    operations: Sequence[TracedOperation]
    transfers: Sequence[Transfer]


class RunGraphs:
    """The graphs that TensorFlow ran: which device has an operation, and which tensors devices send each other."""

    def __init__(self, metadata):
        """Args:
        metadata: a RunMetadata, collected while the functions ran for the first time.
        """
        self._functions = []
        for function in metadata.function_graphs:
            nodes = [node for part in function.partition_graphs for node in part.node]
            self._functions.append({node.name: node for node in nodes})

    def nodes_of_call(self, names: Iterable[str]) -> Mapping:
        """The nodes, by name, of the function that has most of these operations: names repeat between functions.

        None if no function has half of them: then another function was called, for example by the input pipeline.
        """
        names = list(names)
        counts = [sum(name in nodes for name in names) for nodes in self._functions]
        most = max(counts, default=0)
        return self._functions[counts.index(most)] if 2 * most >= max(1, len(names)) else {}


def read_trace(spaces: Iterable, graphs: RunGraphs) -> TracedSteps:
    """Reads the traced steps from the profiler's files.

    Args:
      spaces: XSpace messages.
      graphs: graphs of the functions that the steps call.
    """
    events = [event for space in spaces for plane in space.planes for event in _events(plane)]
    calls = _by_call(events)
    operations, transfers = [], []
    for of_call in calls.values():
        nodes = graphs.nodes_of_call({event.name for event in of_call})
        known = [event for event in of_call if event.name in nodes]
        operations += _operations(known, nodes)
        transfers += _transfers(known, nodes)
    operations = _with_kernels(operations, events)
    return TracedSteps(
        steps={
            int(event.stats.get(STEP_NUMBER, 0)): Span(event.start, event.end)
            for event in events
            if event.name == STEP_EVENT
        },
        reads=[Span(event.start, event.end) for event in events if event.name == _READ],
        operations=sorted(operations, key=lambda one: (one.start_seconds, one.end_seconds)),
        transfers=sorted(transfers, key=lambda one: one.start_seconds),
    )


@dataclasses.dataclass(frozen=True)
class _Event:
    """An event of a thread or of a GPU's stream."""

    name: str
    start: float
    end: float
    line: tuple[str, int]
    stats: Mapping


def _events(plane) -> list[_Event]:
    names = {key: value.name for key, value in plane.stat_metadata.items()}
    found = []
    for line in plane.lines:
        for event in line.events:
            start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
            stats = {names[stat.metadata_id]: _value(stat, plane) for stat in event.stats}
            name = plane.event_metadata[event.metadata_id].name
            found.append(_Event(name, start, start + event.duration_ps * 1e-12, (plane.name, line.id), stats))
    return found


def _value(stat, plane):
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind) if kind else 0
    return plane.stat_metadata[value].name if kind == "ref_value" else value


def _by_call(events: Sequence[_Event]) -> dict[object, list[_Event]]:
    """The operations of each function call, by the call's id; an event has only the operation's name."""
    by_line: dict[tuple, list[_Event]] = collections.defaultdict(list)
    found: dict[object, list[_Event]] = collections.defaultdict(list)
    started: dict[tuple, _Event] = {}
    for event in events:
        by_line[event.line].append(event)
        if event.name == _STARTED:
            started[_key(event)] = event
    for event in events:
        if event.name == _DONE and _key(event) in started:
            begin = started[_key(event)]
            found[event.stats.get("step_id")].append(
                dataclasses.replace(event, name=str(event.stats.get("name")), start=begin.start)
            )
    for of_line in by_line.values():
        call = None
        for event in sorted(of_line, key=lambda one: (one.start, -one.end)):
            if event.name == _CALL:
                call = event
            elif call is not None and event.end <= call.end and (named := _NAMED.match(event.name)):
                found[call.stats.get("id")].append(dataclasses.replace(event, name=named.group(1)))
    return found


def _key(event: _Event) -> tuple:
    return event.stats.get("step_id"), event.stats.get("name")


def _operations(events: Sequence[_Event], nodes: Mapping) -> list[TracedOperation]:
    # In a loop an operation runs in each iteration; the loop's inputs are available in the first one.
    ends: dict[str, float] = {}
    for event in events:
        ends[event.name] = min(event.end, ends.get(event.name, event.end))
    found = []
    for event in events:
        node = nodes[event.name]
        if not _is_transfer(node):
            arrived = [
                ends[name] for name in _computed_inputs(node, nodes, ends) if _brings(nodes[name], event.name)
            ]
            found.append(
                TracedOperation(
                    event.start,
                    event.end,
                    event.name,
                    _short(node.device),
                    waits=node.op.startswith(_WAITING),
                    arrival_seconds=min(max(arrived), event.start) if arrived else None,
                    operation_type=node.op,
                )
            )
    return found


def _computed_inputs(node, nodes: Mapping, ends: Mapping[str, float]) -> list[str]:
    """The operations that ran and that the node waits for; looks through identities, which TensorFlow removed."""
    found, waiting, seen = [], [node], set()
    while waiting:
        for name in waiting.pop().input:
            name = node_of(name)
            if name in ends:
                found.append(name)
            elif name in nodes and name not in seen:
                seen.add(name)
                waiting.append(nodes[name])
    return found


def _brings(node, to: str) -> bool:
    """Whether the node brings something from another device or another activity."""
    return _is_transfer(node) or activity_of(node.name) != activity_of(to)


def _is_transfer(node) -> bool:
    return node.op.endswith((_SEND, _RECV))


def _transfers(events: Sequence[_Event], nodes: Mapping) -> list[Transfer]:
    """The transfers of a call, each from the end of a send to the end of the receive of the same tensor."""
    sent, found = {}, []
    for event in events:
        if nodes[event.name].op.endswith(_SEND):
            sent[_tensor(nodes[event.name])] = event
    for event in events:
        node = nodes[event.name]
        if node.op.endswith(_RECV) and _tensor(node) in sent:
            begin = sent[_tensor(node)]
            source = nodes[begin.name]
            origin = node_of(source.input[0])
            found.append(
                Transfer(begin.end, max(begin.end, event.end), origin, _short(source.device), _short(node.device))
            )
    return found


def _tensor(node) -> tuple:
    return node.attr["tensor_name"].s, node.attr["recv_device"].s


def _with_kernels(operations: Sequence[TracedOperation], events: Sequence[_Event]) -> list[TracedOperation]:
    """The operations, with the times of their GPU kernels where the trace has them."""
    kernels = []
    for event in events:
        of_gpu = _GPU_PLANE.search(event.line[0])
        named = _NAMED.match(str(event.stats.get("tf_op", "")))
        if of_gpu and named:
            kernels.append(TracedOperation(event.start, event.end, named.group(1), of_gpu.group(1)))
    traced = {kernel.device for kernel in kernels}
    return [one for one in operations if one.device not in traced] + kernels


def _short(device: str) -> str:
    """'CPU:0' of '/job:worker/replica:0/task:1/device:CPU:0'."""
    return device.rpartition("device:")[2]
