"""The memory that a call of TensorFlow allocates on CPUs, from the allocator's events in a trace of the call.

TensorFlow traces the allocations of its BFC allocator, which CPUs use only if the environment has
TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts. An event has the requested bytes. The allocator's own
statistics (`tf.config.experimental.get_memory_info`) count the allocated blocks, which are larger.
"""

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterable

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers.errors import UserError

USE_TRACED_ALLOCATOR = {"TF_CPU_ALLOCATOR_USE_BFC": "1"}
_ALLOCATION, _DEALLOCATION = "MemoryAllocation", "MemoryDeallocation"


def allocated_peak(call: Callable[[], object]) -> int:
    """The peak in bytes of what `call` allocates on CPUs: the most that is live at once.

    Raises:
      UserError: the trace has no allocation: TF_CPU_ALLOCATOR_USE_BFC=1 was not set.
    """
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, tf.profiler.experimental.ProfilerOptions(host_tracer_level=3))
        try:
            call()
        finally:
            tf.profiler.experimental.stop()
        spaces = [
            xplane_pb2.XSpace.FromString(path.read_bytes()) for path in pathlib.Path(folder).rglob("*.xplane.pb")
        ]
    events = sorted((event for space in spaces for event in _events(space)), key=lambda event: event[0])
    if not events:
        raise UserError(
            "no allocation was traced: set TF_CPU_ALLOCATOR_USE_BFC=1 in the environment before the program starts"
        )
    return peak_of(event[1:] for event in events)


def peak_of(events: Iterable[tuple[bool, int, int]]) -> int:
    """The largest number of bytes that are live at once.

    Args:
      events: (whether it is an allocation, address, bytes), in order. Memory allocated before the
        first event is ignored.
    """
    live: dict[int, int] = {}
    total = most = 0
    for is_allocation, address, num_bytes in events:
        total -= live.pop(address, 0)
        if is_allocation:
            live[address] = num_bytes
            total += num_bytes
            most = max(most, total)
    return most


def _events(space):
    """(picoseconds, whether it is an allocation, address, bytes) of each event of an allocator."""
    for plane in space.planes:
        names = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                kind = plane.event_metadata[event.metadata_id].name
                if kind in (_ALLOCATION, _DEALLOCATION):
                    found = collections.defaultdict(
                        int,
                        {names[stat.metadata_id]: stat.int64_value or stat.uint64_value for stat in event.stats},
                    )
                    time = line.timestamp_ns * 1000 + event.offset_ps
                    yield time, kind == _ALLOCATION, found["addr"], found["requested_bytes"]
