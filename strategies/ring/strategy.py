"""The strategy 'ring': every worker has a copy of the model and computes its part of each batch.

A step is `strategies.distribute.replicated_engine` (TensorFlow's engine) or `strategies.ring.engine` (our own),
chosen and built in `engine_choice.py`. This file has input, evaluation and checkpoints. What the workers compare
at the start is in `same_start.py`, what they agree on before each call in `agreement.py`, how they exchange and
wait in `connections.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.contract import Move, StepReport, WorkerTime
from strategies.data_checks.batch_checksums import NUM_COMPARED
from strategies.data_checks.first_batches import check_first_batches
from strategies.engines import OWN
from strategies.grouped_towers import GroupedTowers
from strategies.pieces import Piece, parts_of
from strategies.ring.agreement import agreed, wish
from strategies.ring.connections import Connections
from strategies.ring.divergence import checksums, what_drifted
from strategies.ring.engine_choice import TENSORFLOWS_CARRIER, EngineOfWorker, choose_ring_engine
from strategies.ring.exchange.collectives import HostExchange
from strategies.ring.exchange.joining import Ring
from strategies.ring.grouped import grouped_towers_of, kind_of
from strategies.ring.same_start import check_same_batches, check_same_settings
from strategies.ring.shares import all_shares
from strategies.ring.zero.zero_of_groups import SpreadGroups
from strategies.ring.zero.zero_placement import OwnedPlacement
from strategies.ring.zero.zero_slots import SharedParts, bring, release
from strategies.run_settings import common_settings
from strategies.slices import SliceOptions
from strategies.synchronous import SynchronousStrategy
from towers.branches.options import BranchOptions
from towers.devices import Devices
from towers.grid import BRANCH, SLICE, STAGE
from towers.options import StepOptions
from towers.split import check_batch_size, checked_shares
from towers.stages.options import PipelineOptions
from towers.task import Batch, InputShard, Task, batch_length
from towers.tower import EvaluationResult


def ring_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    ring: Ring | None = None,
    pipeline: PipelineOptions | None = None,
    slices: SliceOptions | None = None,
    branches: BranchOptions | None = None,
) -> "RingStrategy":
    """The strategy 'ring'.

    Args:
      task, devices, options, shares: as for every strategy.
      ring: this process's membership; None for a ring of one worker.
      pipeline: stages and schedule of towers that are pipelines; None for others.
      slices: how towers divide layers; None for others.
      branches: how towers divide a model's branches; None for others. Without these, each tower is one device.

    Raises:
      UserError: shares don't fit, the batch is too small for all towers, workers have different settings, or an
        option is not supported for towers of several devices.
    """
    ring = ring or Ring.alone()
    of_towers = {STAGE: pipeline, SLICE: slices, BRANCH: branches}
    towers = grouped_towers_of(task, devices, options, ring.options.wire, of_towers)
    return RingStrategy(task, towers.devices if towers else devices, options, shares, ring, towers)


class RingStrategy(SynchronousStrategy):
    """The strategy on one worker of the ring."""

    def __init__(
        self,
        task: Task,
        devices: Devices,
        options: StepOptions,
        shares,
        ring: Ring,
        towers: GroupedTowers | None = None,
    ):
        """Args:
        task, devices, options, shares, ring: as for `ring_strategy`.
        towers: this worker's towers, if each is several devices.
        """
        self.ring, self._towers = ring, towers
        self._connections = Connections(ring, self._at)
        own_shares = checked_shares(shares, devices.num_towers, "tower_shares")
        with self._connections.watched():
            # The other settings are compared when the models are built: these determine the exchanges before that.
            first = {"engine": ring.options.engine, "zero": devices.zero, "grid": kind_of(towers)}
            check_same_settings(self._host, ring.members, first, purpose="first settings")
            self._shares_by_worker, given = all_shares(self._host, own_shares, ring.options.worker_shares)
            self.engine_choice = choose_ring_engine(ring, self._host, devices, towers)
        self._worker_shares = tuple(sum(of_worker) for of_worker in self._shares_by_worker)
        check_batch_size(task.batch_size, options.accumulation, self.part_shares, len(own_shares), given)
        if towers is not None:
            towers.check(self.part_shares)
        self._microbatches = options.accumulation * ((towers.microbatches if towers else None) or 1)
        exchange = self._connections.connect(devices) if self.engine_choice.name == OWN else None
        engine = EngineOfWorker(
            ring=ring,
            host=self._host,
            exchange=exchange,
            towers=towers,
            task=task,
            devices=devices,
            options=options,
            shares=own_shares,
            shares_by_worker=self._shares_by_worker,
            microbatches=self._microbatches,
        )

        def make_engine(model, spec):
            with self._connections.deadline():
                stand_in = self._stand_in() if ring.num_workers > 1 or self._microbatches > 1 else None
                return engine.build(model, spec, stand_in)

        super().__init__(
            "ring", task, options, make_engine, len(self.part_shares), unprepared=devices.input_on_towers
        )

    @property
    def _host(self) -> HostExchange:
        return self._connections.host

    @property
    def shares_by_worker(self) -> tuple[tuple[float, ...], ...]:
        return self._shares_by_worker

    @property
    def microbatches(self) -> int:
        return self._microbatches

    @property
    def notices(self) -> list[str]:
        by_tcp = self._connections.by_tcp
        carrier = f"{self.ring.num_workers} workers over TCP" if by_tcp else TENSORFLOWS_CARRIER
        if self.ring.num_workers == 1 and self.engine_choice.name == OWN:
            carrier = "one worker, which exchanges nothing"
        of_towers = self._towers.notices if self._towers else []
        return [self.engine_choice.notice(carrier), *of_towers, *super().notices]

    def mode_settings(self) -> dict[str, object]:
        return {"ring": self.ring.options, **(self._towers.settings if self._towers else {})}

    @property
    def keeps_files(self) -> bool:
        return self.ring.rank == 0

    def _dataset(self, split, first_batch=0):
        """This worker's part of each batch; with accumulation, a tuple of its parts of each microbatch."""
        count = self._microbatches if split == "train" else 1
        parts = [
            self._read(
                split,
                InputShard(
                    index=self.ring.rank,
                    count=self.ring.num_workers,
                    shares=self._worker_shares,
                    first_batch=first_batch,
                    microbatch=micro,
                    num_microbatches=count,
                ),
            )
            for micro in range(count)
        ]
        return parts[0] if count == 1 else tf.data.Dataset.zip(tuple(parts))

    def _stand_in(self, split: str = "train") -> Batch:
        """The first example of a split, as a batch. It is in rank 0's part of its batch, whatever the shares."""
        shard = InputShard(index=0, count=self.ring.num_workers, shares=self._worker_shares)
        first = next(iter(self._read(split, shard)))
        return tf.nest.map_structure(lambda tensor: tensor[:1], first)

    def _check_alike(self) -> None:
        """Raises UserError if the workers were not all started with the same settings."""
        shapes = {variable.path: variable.shape for variable in self.model.trainable_variables}
        divided = {} if self._towers is None else {self._towers.name: self._towers.options}
        own = common_settings(
            self.task, self.options, evaluates=True, shapes=shapes, ring=self.ring.options, **divided
        )
        with self._connections.watched():
            check_same_settings(self._host, self.ring.members, own)

    def _check_data(self) -> None:
        """Also raises UserError if the workers read different batches: each computes its part of what it reads."""
        self._check_alike()
        is_divided = self.ring.num_workers > 1 or self._microbatches > 1
        num_compared = NUM_COMPARED if is_divided else 1
        found = check_first_batches(self.task, self.model, num_compared=num_compared)
        with self._connections.watched():
            check_same_batches(
                self._host,
                self.ring.members,
                found,
                num_compared=num_compared,
                microbatches=self._microbatches,
            )

    # The workers meet on the host at the end of each call, and a deadline runs until then.
    _reports_late = False

    def run_steps(self, num_steps: int) -> StepReport:
        first = self.step
        with self._connections.watched():
            try:
                report = super().run_steps(num_steps)
            finally:
                self._connections.end_deadline()
            times = self._host.gather("times", [self.engine.busy.take_seconds(), report.input_seconds])
            every = self.ring.options.check_divergence_every_steps
            if every is not None and report.step // every > first // every:
                self.check_divergence()
        workers = tuple(
            WorkerTime(name=member.name, busy_seconds=float(busy), input_seconds=float(waited))
            for member, (busy, waited) in zip(self.ring.members, times, strict=True)
        )
        return dataclasses.replace(report, workers=workers if self.ring.num_workers > 1 else ())

    def _next_batch(self, step):
        self._connections.start_deadline()
        return super()._next_batch(step)

    def check_divergence(self) -> None:
        """Compares, bit by bit, the parameters, state and slots that all workers have.

        Raises:
          Diverged: a worker's copy differs; the message names it.
        """
        values = {kind: here for kind, here in self.checkpointables().items() if kind not in self._spread_kinds}
        named = {**values.get("parameters", {}), **values["state"]}
        for slot, by_name in values.get("slots", {}).items():
            named |= {f"{slot} of {name}": variable for name, variable in by_name.items()}
        found = self._host.gather("checksums", checksums(v.numpy().tobytes() for v in named.values()))
        what_drifted([member.name for member in self.ring.members], list(named), found, self.step)

    def _all_true(self, here: bool) -> bool:
        return bool(self._host.gather("all true", [here]).all())

    def evaluate(self, num_batches: int | None = None, **named) -> dict[str, float] | None:
        with self._connections.watched():
            return super().evaluate(num_batches, **named)

    def _evaluator(self, batch_spec: Batch) -> Callable[[Batch], EvaluationResult]:
        evaluate = super()._evaluator(batch_spec)

        def evaluated(batch: Batch) -> EvaluationResult:
            """Zeros for an empty part: computes a stand-in, to know the names of the metrics."""
            if int(batch_length(batch)) > 0:
                return evaluate(batch)
            return tf.nest.map_structure(tf.zeros_like, evaluate(self._evaluation_stand_in))

        return evaluated

    @functools.cached_property
    def _evaluation_stand_in(self) -> Batch:
        return self._stand_in("eval")

    def _over_all(self, sums: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The sums over all workers, added in rank order, so that all workers divide the same numbers."""
        own = np.concatenate(list(sums.values()))
        total = self._host.gather("evaluation", own).sum(axis=0)
        return dict(zip(sums, total.reshape(-1, 2), strict=True))

    def agree(self, move: Move) -> Move:
        with self._connections.watched():
            wishes = self._host.gather("move", wish(move), np.int64)
        return agreed(move, wishes, self.ring.members, save_together=bool(self._spread_kinds))

    @property
    def _spread(self) -> list:
        """The variables of which each worker holds only its own parts, with their owners."""
        placement = self.engine.placement
        return placement.spread_with_owners if isinstance(placement, OwnedPlacement | SpreadGroups) else []

    @property
    def _spread_kinds(self) -> tuple[str, ...]:
        """Which of 'parameters' and 'slots' are spread over the workers."""
        return getattr(self.engine.placement, "spread_kinds", ())

    def agree_to_save(self, wanted: bool) -> bool:
        """Rank 0 decides. It needs the others only if variables are spread over the workers."""
        if not self._spread_kinds:
            return wanted
        with self._connections.watched():
            return bool(self._host.gather("save", [wanted])[0, 0])

    def collect(self) -> None:
        with self._connections.watched():
            bring(self._host, self._spread)

    def collect_parameters(self) -> None:
        if "parameters" in self._spread_kinds:
            with self._connections.watched():
                bring(self._host, self.engine.placement.parameters_with_owners)

    def release(self) -> None:
        release(self._spread)

    @property
    def _shared_parts(self) -> SharedParts:
        return SharedParts(self._host, self._spread)

    def values(self, pieces: Sequence[Piece]) -> Iterator[tf.Tensor | None]:
        with self._connections.watched():
            yield from self._shared_parts.values(pieces)

    def restore(self, part: Piece, read: Callable[[Piece], tf.Tensor]) -> None:
        self._shared_parts.restore(part, read)

    def share_restored(self, step: int | None, read: Callable[[Piece], tf.Tensor] | None = None) -> int | None:
        with self._connections.watched():
            (saved_step,) = self._host.gather("restored", [-1 if step is None else step], np.int64)[0]
            if saved_step < 0:
                return None
            self._shared_parts.share(parts_of(self.checkpointables()), read)
        self.restored()
        return int(saved_step)

    def _at(self) -> str:
        return f"step {self.step}" if hasattr(self, "engine") else "the start"
