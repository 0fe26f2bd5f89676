"""The order in which TensorFlow runs the operations of a graph on several threads. Plain arithmetic.

Source: `ExecutorState::ScheduleReady` and `Process` in tensorflow/core/common_runtime/executor.cc, and Eigen's
NonBlockingThreadPool; compared with the order of operations in traces of a step.

    a thread ends an operation; what became ready is taken in the order of the graph:
      cheap operations (reshapes, reads of variables)   the thread runs them next, one after the other
      the last of the others                            the same thread, if there is no cheap one
      the rest                                          to the front of the thread's own queue
      operations of another device                      to the front of the thread's own queue
    then it takes the front of its own queue, or else the back of another thread's

Each device's part of the graph begins with one operation; after it, all operations without other inputs are ready.

So of a convolution's two gradients, which become ready together, the later one in the graph runs at once and the
other one after all that follows from the first. Gradients of kernels run last, the last layer's very last.

With several threads the order differs from step to step, because an operation takes longer where a thread waits
for a core, a lock or memory. `schedule` has an order for each seed: with seeds 0 and 1 costs are as given, with
others they are multiplied by exp(x), where x has the normal distribution with standard deviation 1.

A device gets a tensor from another device once the tensor exists and an operation has begun to receive it. These
receiving operations are ready from the beginning. A thread that finds nothing else takes them from the back of
another queue. A thread that waits for a core, and wakes up late, finds other work; the receiving operations then
lie behind all that became ready later, and the sums of towers' gradients come after all gradients that the first
thread computes. In traced steps of ResNet-20 on two towers and busy cores, 4 of 20 began to receive after 0.6 to
0.9 of the step. The order in which these operations enter the queue differs from process to process, because an
operation's many followers are kept in a hash set. With an odd seed only one thread is awake at the beginning, and
the operations that sums wait for enter the queue first, so that they are taken last.
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


# How late a thread wakes up, as a fraction of the cost of all operations; varied by the seed like costs.
_LATE = 0.01
# TensorFlow keeps more edges than these in a hash set (EdgeSet in tensorflow/core/graph/edgeset.h).
_MOST_IN_ORDER = 8


def schedule(
    operations: Sequence[Scheduled], num_threads: int = 1, *, seed: int = 0
) -> Iterator[tuple[int, bool]]:
    """Yields when each operation begins and ends, in order: its index, and whether it ends.

    Args:
      operations: operations of the graph.
      num_threads: number of operations that may run at once.
      seed: selects one of the orders of several threads; 0 for costs as given and all threads awake.

    Raises:
      ValueError: operations wait for each other in a circle.
    """
    draw = random.Random(seed)

    def disturbed(cost: float) -> float:
        return cost * (draw.lognormvariate(0, 1) if seed > 1 else 1)

    costs = [disturbed(one.cost) for one in operations]
    is_late = seed % 2 == 1
    waiting = _Waiting(operations, reverses=is_late)
    threads = _Threads(operations, num_threads, waiting.first)
    # (time of the end, order of the beginning, thread, index); index None for a thread that wakes up.
    running: list[tuple[float, int, int, int | None]] = []
    for thread in range(1, num_threads):
        wakes = disturbed(_LATE * sum(costs)) if is_late else 0
        heapq.heappush(running, (wakes, thread - num_threads, thread, None))
    now, begun = 0.0, 0
    while True:
        for thread, index in threads.taken():
            begun += 1
            heapq.heappush(running, (now + costs[index], begun, thread, index))
            yield index, False
        if not running:
            break
        now, _, thread, index = heapq.heappop(running)
        if index is None:
            threads.wake(thread)
            continue
        yield index, True
        threads.end(thread, index, waiting.end(index))
    waiting.check_all_ran()


class _Waiting:
    """What each operation waits for.

    Attributes:
      first: indices of the operations that wait for nothing.
    """

    def __init__(self, operations: Sequence[Scheduled], *, reverses: bool):
        """Args:
        operations: operations of the graph.
        reverses: whether, if an operation has many followers, they enter a queue in the reverse order of the
          graph.
        """
        self._operations = operations
        self._counts = []
        followers: list[list[tuple[bool, int]]] = [[] for _ in operations]
        for index, one in enumerate(operations):
            data = {source for source, _ in one.reads}
            control = set(one.after) - data
            self._counts.append(len(data) + len(control))
            # Operations that read a result come before those that only run after it.
            for source in data:
                followers[source].append((False, index))
            for source in control:
                followers[source].append((True, index))
        self.first = [index for index, count in enumerate(self._counts) if not count]
        self._followers = [
            self._in_order(found, reverses=reverses and len(found) > _MOST_IN_ORDER) for found in followers
        ]

    def _in_order(self, followers: Sequence[tuple[bool, int]], *, reverses: bool) -> list[int]:
        found = [index for _, index in sorted(followers)]
        if not reverses:
            return found
        cheap = [index for index in found if self._operations[index].is_cheap]
        return cheap + [index for index in reversed(found) if not self._operations[index].is_cheap]

    def end(self, index: int) -> list[int]:
        """The operations that are ready because this one has ended, in the order of the graph."""
        found = []
        for follower in self._followers[index]:
            self._counts[follower] -= 1
            if not self._counts[follower]:
                found.append(follower)
        return found

    def check_all_ran(self) -> None:
        left = [one.name for one, count in zip(self._operations, self._counts, strict=True) if count]
        if left:
            raise ValueError(f"these operations wait for each other: {', '.join(left[:5])}")


class _Threads:
    """The operations that are ready, by the thread that has them. At first only thread 0 is awake."""

    def __init__(self, operations: Sequence[Scheduled], num_threads: int, first: Sequence[int]):
        self._operations = operations
        self._next: list[collections.deque[int]] = [collections.deque() for _ in range(num_threads)]
        self._queues: list[collections.deque[int]] = [collections.deque() for _ in range(num_threads)]
        for position, index in enumerate(first):
            self._queues[position % num_threads].append(index)
        # The thread that has just ended an operation goes on before another one can steal from it.
        self._idle = [0]

    def wake(self, thread: int) -> None:
        """Lets the thread take operations from now on."""
        self._idle.append(thread)

    def taken(self) -> Iterator[tuple[int, int]]:
        """(thread, index) of each operation that an idle thread begins now."""
        still = []
        for thread in self._idle:
            index = self._take(thread)
            if index is None:
                still.append(thread)
            else:
                yield thread, index
        self._idle = still

    def end(self, thread: int, index: int, ready: Sequence[int]) -> None:
        """Ends an operation of the thread, and gives it the operations that became ready."""
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
