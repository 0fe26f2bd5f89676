"""The order in which TensorFlow runs the operations of a graph on several threads. Plain arithmetic.

Source: `ExecutorState::ScheduleReady` and `Process` in tensorflow/core/common_runtime/executor.cc, and Eigen's
NonBlockingThreadPool; compared with the order of operations in traces of a step.

    a thread ends an operation; what became ready is taken in the order of the graph:
      cheap operations (reshapes, reads of variables)   the thread runs them next, one after the other
      the last of the others                            the same thread, if there is no cheap one
      the rest                                          to the front of the thread's own queue
      operations of another device                      to the front of the thread's own queue
    then it takes the front of its own queue, or else the back of another thread's

So of a convolution's two gradients, which become ready together, the later one in the graph runs at once and the
other one after all that follows from the first. Gradients of kernels run last, the last layer's very last.

Several threads run the operations of each step in another order, because an operation takes longer where a thread
waits for a core, a lock or memory. `schedule` has an order for each seed: costs are multiplied by exp(x), where x
has the normal distribution with standard deviation 1; with seed 0 they are as given.

Operations on tensors of several devices, such as the sums of towers' gradients, may also be late: some steps reach
the peak of an order in which all gradients of both towers are computed before the first sum. With `joins_last` a
thread begins such an operation only if it finds no other one that is ready.
"""

import collections
import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Protocol


class Scheduled(Protocol):
    """What the order depends on: see `towers.memory.lifetimes.Operation`."""

    name: str
    reads: tuple[tuple[int, int], ...]
    after: tuple[int, ...]
    cost: float
    executor: str
    is_cheap: bool
    joins_devices: bool


def schedule(
    operations: Sequence[Scheduled], num_threads: int = 1, *, seed: int = 0, joins_last: bool = False
) -> Iterator[tuple[int, bool]]:
    """Yields when each operation begins and ends, in order: its index, and whether it ends.

    Args:
      operations: of the graph.
      num_threads: number of operations that may run at once.
      seed: which of the orders of several threads; 0 for that of the costs as given.
      joins_last: whether operations that join devices wait until a thread has nothing else to begin.

    Raises:
      ValueError: operations wait for each other in a circle.
    """
    costs = _costs(operations, seed)
    waiting = _Waiting(operations)
    threads = _Threads(operations, num_threads, waiting.first, joins_last=joins_last)
    # (time of the end, order of the beginning, thread, index)
    running: list[tuple[float, int, int, int]] = []
    now, begun = 0.0, 0
    while True:
        for thread, index in threads.taken():
            begun += 1
            heapq.heappush(running, (now + costs[index], begun, thread, index))
            yield index, False
        if not running:
            break
        now, _, thread, index = heapq.heappop(running)
        yield index, True
        threads.end(thread, index, waiting.end(index))
    waiting.check_all_ran()


def _costs(operations: Sequence[Scheduled], seed: int) -> list[float]:
    delay = random.Random(seed)
    return [one.cost * (delay.lognormvariate(0, 1) if seed else 1) for one in operations]


class _Waiting:
    """What each operation waits for.

    Attributes:
      first: indices of the operations that wait for nothing.
    """

    def __init__(self, operations: Sequence[Scheduled]):
        self._operations = operations
        self._counts, self._followers = [], [[] for _ in operations]
        for index, one in enumerate(operations):
            data = {source for source, _ in one.reads}
            control = set(one.after) - data
            self._counts.append(len(data) + len(control))
            # An operation that reads a result comes before one that only runs after it.
            for source in data:
                self._followers[source].append((False, index))
            for source in control:
                self._followers[source].append((True, index))
        self.first = [index for index, count in enumerate(self._counts) if not count]

    def end(self, index: int) -> list[int]:
        """The operations that are ready because this one has ended, in the order of the graph."""
        found = []
        for _, follower in sorted(self._followers[index]):
            self._counts[follower] -= 1
            if not self._counts[follower]:
                found.append(follower)
        return found

    def check_all_ran(self) -> None:
        left = [one.name for one, count in zip(self._operations, self._counts, strict=True) if count]
        if left:
            raise ValueError(f"these operations wait for each other: {', '.join(left[:5])}")


class _Threads:
    """The operations that are ready, by the thread that has them."""

    def __init__(
        self, operations: Sequence[Scheduled], num_threads: int, first: Sequence[int], *, joins_last: bool
    ):
        self._operations = operations
        self._joins_last = joins_last
        # Operations that join devices, if they come last.
        self._late: collections.deque[int] = collections.deque()
        self._next: list[collections.deque[int]] = [collections.deque() for _ in range(num_threads)]
        self._queues: list[collections.deque[int]] = [collections.deque() for _ in range(num_threads)]
        for position, index in enumerate(first):
            self._queues[position % num_threads].append(index)
        # The thread that has just ended an operation goes on before another one can steal from it.
        self._idle = list(range(num_threads))

    def taken(self) -> Iterator[tuple[int, int]]:
        """(thread, index) of each operation that an idle thread begins now."""
        still = []
        for thread in self._idle:
            index = self._take(thread)
            if index is None and self._late:
                index = self._late.popleft()
            if index is None:
                still.append(thread)
            else:
                yield thread, index
        self._idle = still

    def end(self, thread: int, index: int, ready: Sequence[int]) -> None:
        """Gives the thread, which has ended an operation, what became ready."""
        if self._joins_last:
            self._late.extend(one for one in ready if self._operations[one].joins_devices)
            ready = [one for one in ready if not self._operations[one].joins_devices]
        executor = self._operations[index].executor
        own = [one for one in ready if self._operations[one].executor == executor]
        self._next[thread].extend(one for one in own if self._operations[one].is_cheap)
        *others, last = [one for one in own if not self._operations[one].is_cheap] or [None]
        if last is not None and not self._next[thread]:
            self._next[thread].append(last)
        elif last is not None:
            others.append(last)
        elsewhere = [one for one in ready if self._operations[one].executor != executor]
        self._queues[thread].extendleft([*elsewhere, *others])
        self._idle.insert(0, thread)

    def _take(self, thread: int) -> int | None:
        for own in (self._next[thread], self._queues[thread]):
            if own:
                return own.popleft()
        count = len(self._queues)
        others = (self._queues[(thread + step) % count] for step in range(1, count))
        return next((other.pop() for other in others if other), None)
