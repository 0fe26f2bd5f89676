"""A worker of a parameter-server group: pulls, computes on its batch, pushes, until the run ends."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from strategies.servers.coordination import KEY
from strategies.servers.group import Group
from strategies.servers.layout import Layout
from strategies.servers.options import ServersOptions
from strategies.servers.wire import Content
from strategies.servers.worker_engine import Computed, WorkerEngine
from strategies.synchronous import as_batches
from towers.errors import UserError
from towers.task import Batch, InputShard, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pulled:
    """What a step is computed from.

    Attributes:
      number: of the step.
      done: how many steps were finished when it was given out.
      versions: of each server's piece.
      parameters: the whole vector.
      state: float64, all of it.
    """

    number: int
    done: int
    versions: Sequence[int]
    parameters: np.ndarray
    state: np.ndarray


class Worker:
    """One worker's loop."""

    def __init__(
        self,
        task: Task,
        engine: WorkerEngine,
        group: Group,
        layout: Layout,
        options: ServersOptions,
        *,
        rank: int,
        num_workers: int,
        stop_asked: Callable[[], bool] = lambda: False,
        before_step: Callable[[int], None] = lambda step: None,
    ):
        """Args:
        task: what is trained.
        engine: computes.
        group: connections to the servers.
        layout: who keeps what.
        options: of the group.
        rank, num_workers: this worker's place.
        stop_asked: whether this process was asked to stop; the chief is told.
        before_step: called with the number of each step it begins.
        """
        self._task, self._engine, self._group, self._layout = task, engine, group, layout
        self._options, self._rank, self._num_workers = options, rank, num_workers
        self._stop_asked, self._before_step = stop_asked, before_step
        self._batches: Iterator[tuple[Batch, ...]] | None = None
        self._next_batch = -1

    def run(self) -> str:
        """Works until the chief ends the run; how it ended: 'done' or 'interrupted'.

        Raises:
          PeerLost: a server is gone.
        """
        told: list[Content] = []
        if not self._options.prefetch:
            while not isinstance(pulled := self._pull(told), str):
                told = [] if pulled is None else self._push(pulled, *self._compute(pulled))
            return pulled
        with concurrent.futures.ThreadPoolExecutor(1) as ahead:
            pulled = self._pull(told)
            while not isinstance(pulled, str):
                following = ahead.submit(self._pull, told)
                computed = None if pulled is None else self._compute(pulled)
                # The pushes go by the same connections as the pulls.
                following = following.result()
                told = [] if computed is None else self._push(pulled, *computed)
                pulled = following
            return pulled

    def _pull(self, told: Sequence[Content]) -> Pulled | str | None:
        """The next step's; or how the run ended; None if there is no step as yet.

        What an earlier step came to is told server 0 in one breath with the wish for the next.
        """
        begin = {"ask": "begin", "worker": self._rank, "stop_asked": self._stop_asked()}
        *_, (answer, arrays) = self._group.ask_in_turn(0, *told, (begin, ()))
        if "end" in answer:
            return answer["end"]
        if "again" in answer:
            return None
        state, piece = arrays
        others = {server: ({}, ()) for server in range(1, len(self._group.servers))}
        pulled = self._group.ask_each("pull", others, key=KEY)
        return Pulled(
            number=answer["number"],
            done=answer["done"],
            versions=[answer["version"], *(found["version"] for found, _ in pulled)],
            parameters=np.concatenate([piece, *(other for _, (other,) in pulled)]) if others else piece,
            state=state,
        )

    def _compute(self, pulled: Pulled) -> tuple[Computed, dict]:
        """A step's gradient, and what the reports say of it."""
        self._before_step(pulled.number)
        asked = time.perf_counter()
        batches = self._batch_of(pulled.number)
        began = time.perf_counter()
        computed = self._engine.compute(pulled.number, pulled.parameters, pulled.state, batches)
        return computed, {
            "examples": computed.examples,
            "sums": computed.sums,
            "norm": computed.norm,
            "busy_seconds": time.perf_counter() - began,
            "input_seconds": began - asked,
        }

    def _push(self, pulled: Pulled, computed: Computed, told) -> list[Content]:
        """To all servers but the first; its part is returned: what it counts, the others have."""
        number = pulled.number
        if self._options.backup_workers:
            answer, _ = self._group.ask(0, "admit", worker=self._rank, number=number)
            if not answer["wanted"]:
                return []
        question = {
            "key": KEY,
            "number": number,
            "worker": self._rank,
            "rate": self._engine.options.schedule(number),
            "aware": self._options.staleness_aware,
        }
        pieces = [computed.gradient.within(self._layout.piece(n)) for n in range(len(pulled.versions))]
        (rows, arrays), *others = [piece.packed() for piece in pieces]
        elsewhere = {}
        if self._options.is_sync or computed.finite:
            elsewhere = {
                server: ({"rows": rows, "since": pulled.versions[server]}, arrays)
                for server, (rows, arrays) in enumerate(others, start=1)
            }
        # Server 0 may have given the step to another meanwhile.
        self._group.check(0)
        answers = self._group.ask_each("hold" if self._options.is_sync else "push", elsewhere, **question)
        finish = {
            "ask": "finish",
            **question,
            "rows": rows,
            "since": pulled.versions[0],
            "done": pulled.done,
            "weight": computed.weight,
            "finite": computed.finite,
            "staleness_elsewhere": [answer.get("staleness", 0) for answer, _ in answers],
            "told": told,
        }
        return [(finish, [computed.state_change, *arrays])]

    def _batch_of(self, number: int) -> tuple[Batch, ...]:
        """This worker's part of each microbatch of a step; without waiting for others, of its own next batch."""
        together = self._options.is_sync
        wanted = number if together else self._own_next(number)
        if self._batches is None or wanted != self._next_batch:
            self._batches = iter(self._dataset(wanted))
        self._next_batch = wanted + (1 if together else self._num_workers)
        try:
            found = next(self._batches)
        except StopIteration:
            raise UserError(
                f"the training data ended at batch {wanted}: a task's 'train' split never ends; repeat() it"
            ) from None
        return found if self._engine.options.accumulation > 1 else (found,)

    def _own_next(self, number: int) -> int:
        """Batches rank, rank + workers, rank + 2 workers, ... are this worker's; which of them is next."""
        if self._batches is not None:
            return self._next_batch
        return number + (self._rank - number) % self._num_workers

    def _dataset(self, first: int) -> tf.data.Dataset:
        together, count = self._options.is_sync, self._engine.options.accumulation
        parts = [
            as_batches(
                self._task.dataset(
                    "train",
                    InputShard(
                        index=self._rank if together else 0,
                        count=self._num_workers if together else 1,
                        first_batch=first,
                        stride=1 if together else self._num_workers,
                        microbatch=micro,
                        num_microbatches=count,
                    ),
                )
            )
            for micro in range(count)
        ]
        return parts[0] if count == 1 else tf.data.Dataset.zip(tuple(parts))
