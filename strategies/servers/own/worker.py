"""A worker of a parameter-server group: it pulls, computes on its batch and pushes until the run ends.

Asynchronous or bounded:

    server 0: ticket (step k, may wait for the bound)      servers: one piece each of the parameter vector
        |                                                      |  pull pieces         ^ stage pieces, server 0 last
        v                                                      v                      |
    worker: own batch -> towers -> sum -> / weight -> clip ----+--> gradient vector --+--> update, one at a time

Synchronous, where the workers divide one batch:

    worker 0's part -> towers -> SUM -- push -> servers hold the SUMs of all workers
    worker 1's part -> towers -> SUM -- push ->     | server 0, when the last one arrives: squared norms of pieces
                                                   v
                                     / weight and clip by one factor -> update every piece, or none
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.data_checks.batches import as_batches
from strategies.run_settings import Plain
from strategies.servers.batch_reader import BatchReader
from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.handlers import KEY
from strategies.servers.own.steps.decisions import Decisions
from strategies.servers.own.steps.piece_gradient import Rows
from strategies.servers.own.worker_engine import Computed, WorkerEngine
from strategies.servers.tables import ParameterLayout, of_server
from strategies.servers.wire import Content
from towers.task import Batch, InputShard, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pulled:
    """The values that a step is computed from.

    Attributes:
      step: index of the step.
      done: number of steps that were done when this step was assigned.
      part: for synchronous steps, the index of the part of the batch to compute, this worker's or a lost one's;
        else 0.
      lease: number of the step's ticket, or of the part's lease.
      version: version of server 0's piece.
      parameters: the whole vector of the parameters that are not tables.
      rows: for each matrix of tables the rows that the batches name: ids, and values [n, width].
      state: the model's state without the frozen weights, as one vector.
      batches: the batches that this worker computes, one for each microbatch.
      input_seconds: seconds that it waited for the batches.
    """

    step: int
    done: int
    part: int
    lease: int
    version: int
    parameters: np.ndarray
    rows: Sequence[Rows]
    state: np.ndarray
    batches: tuple[Batch, ...]
    input_seconds: float


class Worker:
    """The loop of one worker."""

    def __init__(
        self,
        task: Task,
        engine: WorkerEngine,
        group: Group,
        layout: ParameterLayout,
        options: ServersOptions,
        *,
        rank: int,
        num_workers: int,
        stop_asked: Callable[[], bool] = lambda: False,
        before_step: Callable[[int], None] = lambda step: None,
    ):
        """Args:
        task: the task to train.
        engine: computes the gradients.
        group: connections to the servers.
        layout: where each parameter is on the servers.
        options: how the group works.
        rank: index of this worker.
        num_workers: number of workers in the cluster.
        stop_asked: whether this process was asked to stop; each `begin` request reports it to server 0.
        before_step: called with the index of each step before it is computed.
        """
        self._task, self._engine, self._group, self._layout = task, engine, group, layout
        self._options, self._rank, self._num_workers = options, rank, num_workers
        self._stop_asked, self._before_step = stop_asked, before_step
        # By index of the part, a reader for each part that this worker has computed.
        self._readers: dict[int, BatchReader] = {}
        # Number of server 0's decisions that this worker has passed on to all other servers.
        self._settled = 0
        # Number of the chief's start that set the frozen weights which the engine has.
        self._frozen_of: int | None = None

    def join(self, settings: Mapping[str, Plain]) -> None:
        """Sends this worker's settings, and waits until the chief has started the run.

        Raises:
          UserError: a worker was started with other settings than the chief.
          PeerLost: a server was lost.
        """
        again = True
        while again:
            reply, _ = self._group.ask(0, "join", worker=self._rank, settings=settings)
            again = reply.get("again", False)

    def run(self) -> str:
        """Works until the chief ends the run; returns how it ended: 'done' or 'interrupted'.

        Raises:
          PeerLost: a server was lost.
        """
        finished: list[Content] = []
        if not self._options.prefetch:
            while not isinstance(pulled := self._pull(finished), str):
                finished = [] if pulled is None else self._push(pulled, *self._compute(pulled))
            return pulled
        with concurrent.futures.ThreadPoolExecutor(1) as ahead:
            pulled = self._pull(finished)
            while not isinstance(pulled, str):
                following = ahead.submit(self._pull, finished)
                computed = None if pulled is None else self._compute(pulled)
                # Pushes use the same connections as pulls, so the prefetched pull must have ended.
                following = following.result()
                finished = [] if computed is None else self._push(pulled, *computed)
                pulled = following
            return pulled

    def _pull(self, finished: Sequence[Content]) -> Pulled | str | None:
        """The next step's values; or how the run ended; or None if no step may begin yet.

        Args:
          finished: the `finish` request of an earlier step, or empty; it is sent together with `begin`.
        """
        begin = {
            "ask": "begin",
            "worker": self._rank,
            "stop_asked": self._stop_asked(),
            "settled": self._settled,
        }
        *_, (reply, arrays) = self._group.ask_in_turn(0, *finished, (begin, ()))
        if "end" in reply:
            return reply["end"]
        if "again" in reply:
            return None
        state, piece = arrays
        others = {server: ({}, ()) for server in range(1, len(self._group.servers))}
        pulled = self._group.ask_each("pull", others, key=KEY, decided=reply["decided"])
        if reply["decided"] is not None:
            self._settled = Decisions(**reply["decided"]).end
        if reply.get("frozen_of") != self._frozen_of:
            self._pull_frozen()
        asked = time.perf_counter()
        batches = self._batch_of(reply["batch"], reply["part"])
        input_seconds = time.perf_counter() - asked
        return Pulled(
            step=reply["step"],
            done=reply["done"],
            part=reply["part"],
            lease=reply["lease"],
            version=reply["version"],
            parameters=np.concatenate([piece, *(other for _, (other,) in pulled)]) if others else piece,
            rows=self._pull_rows(self._engine.wanted(batches)),
            state=state,
            batches=batches,
            input_seconds=input_seconds,
        )

    def _pull_frozen(self) -> None:
        reply, arrays = self._group.ask(0, "frozen")
        self._engine.set_frozen(arrays)
        self._frozen_of = reply["frozen_of"]

    def _pull_rows(self, wanted: Sequence[np.ndarray]) -> list[Rows]:
        """The named rows of each matrix of tables, from all servers."""
        if not wanted:
            return []
        tables = [table.name for table in self._layout.tables]
        count = len(self._group.servers)
        dealt = [[of_server(ids, server, count) for ids in wanted] for server in range(count)]
        asked = {server: ({}, [ids for _, ids in parts]) for server, parts in enumerate(dealt)}
        found = [arrays for _, arrays in self._group.ask_each("pull_rows", asked, key=KEY, tables=tables)]
        rows = []
        for index, ids in enumerate(wanted):
            values = np.empty((len(ids), self._layout.tables[index].width), found[0][index].dtype)
            for parts, arrays in zip(dealt, found, strict=True):
                here, _ = parts[index]
                values[here] = arrays[index]
            rows.append((ids, values))
        return rows

    def _gradient_of(self, server: int, computed: Computed) -> list[np.ndarray]:
        """The arrays of a server's part of the gradient."""
        count = len(self._group.servers)
        arrays = [computed.gradient[self._layout.vector.piece(server)]]
        for ids, values in computed.rows:
            here, own_ids = of_server(ids, server, count)
            arrays += [own_ids, values[here]]
        return arrays

    def _compute(self, pulled: Pulled) -> tuple[Computed, dict]:
        """A step's gradient, and its figures for the report."""
        self._before_step(pulled.step)
        began = time.perf_counter()
        computed = self._engine.compute(
            pulled.step, pulled.part, pulled.parameters, pulled.rows, pulled.state, pulled.batches
        )
        return computed, {
            "examples": computed.examples,
            "sums": computed.sums,
            "norm": computed.norm,
            "busy_seconds": time.perf_counter() - began,
            "input_seconds": pulled.input_seconds,
        }

    def _push(self, pulled: Pulled, computed: Computed, figures: Mapping) -> list[Content]:
        """Sends the gradient to all servers except server 0, and returns the request for server 0.

        Server 0 decides, so it gets its piece after the other servers have theirs.
        """
        step = pulled.step
        if self._options.backup_workers:
            reply, _ = self._group.ask(0, "admit", lease=pulled.lease)
            if not reply["wanted"]:
                return []
        shared = {
            "key": KEY,
            "step": step,
            "worker": self._rank,
            "lease": pulled.lease,
            "rate": self._engine.options.rate(step),
            "aware": self._options.staleness_aware,
            "rows": [],
        }
        elsewhere = {}
        if self._options.is_sync or computed.finite:
            elsewhere = {
                server: ({}, self._gradient_of(server, computed)) for server in range(1, len(self._group.servers))
            }
        # If server 0 has closed the connection, it has assigned the step to another worker.
        self._group.check(0)
        self._group.ask_each("hold" if self._options.is_sync else "stage", elsewhere, **shared)
        finish = {
            "ask": "finish",
            **shared,
            "since": pulled.version,
            "done": pulled.done,
            "weight": computed.weight,
            "finite": computed.finite,
            "figures": figures,
        }
        return [(finish, [computed.state_change, *self._gradient_of(0, computed)])]

    def _batch_of(self, index: int, part: int) -> tuple[Batch, ...]:
        """This worker's part of a batch: one batch for each microbatch."""
        if part not in self._readers:
            # Synchronous: a part of each step's batch. Asynchronous: whole batches, in turns.
            stride = 1 if self._options.is_sync else self._num_workers
            self._readers[part] = BatchReader(functools.partial(self._dataset, part=part), stride)
        found = self._readers[part].read(index)
        return found if self._engine.options.accumulation > 1 else (found,)

    def _dataset(self, first: int, part: int) -> tf.data.Dataset:
        is_sync, count = self._options.is_sync, self._engine.options.accumulation
        parts = [
            as_batches(
                self._task.dataset(
                    "train",
                    InputShard(
                        index=part,
                        count=self._num_workers if is_sync else 1,
                        first_batch=first,
                        stride=1 if is_sync else self._num_workers,
                        microbatch=micro,
                        num_microbatches=count,
                    ),
                )
            )
            for micro in range(count)
        ]
        return parts[0] if count == 1 else tf.data.Dataset.zip(tuple(parts))
