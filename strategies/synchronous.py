"""The host's part of every synchronous strategy: the loop over steps, their reports, and evaluation.

The engine decides where towers run and how their gradients are summed.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from strategies.contract import Move, StepReport
from strategies.data_checks.bad_steps import BadSteps
from strategies.data_checks.batches import as_batches, readable_batches
from strategies.data_checks.built_model import built_model
from strategies.data_checks.data_errors import readable_errors, readable_placement
from strategies.data_checks.first_batches import check_first_batches
from strategies.data_checks.non_finite import Causes
from strategies.engines import EngineChoice
from strategies.pieces import Piece
from strategies.portable_model import check_savable, portable_model
from strategies.run_settings import fields_of, step_settings
from strategies.steps.execution_length import ExecutionLength
from strategies.steps.executions import Executions, reads_in_graph
from strategies.steps.late_reports import LateReports
from strategies.steps.outcomes_on_host import Arrived, on_host
from strategies.steps.step_report import mean_of, report_of
from strategies.steps.training_batches import TrainingBatches
from towers.devices import HOST, Devices
from towers.engine import Engine
from towers.errors import UserError
from towers.input.tower_parts import open_length
from towers.input.unprepared import read_dataset
from towers.options import StepOptions
from towers.precision import loss_scaling_for
from towers.recompute import recomputation
from towers.task import Batch, InputShard, Task, steps_per_epoch
from towers.tower import EvaluationResult


class SynchronousStrategy:
    """Implements `strategies.contract.Strategy` over an engine."""

    # The time when the previous steps were done.
    _done_at = 0.0

    def __init__(
        self,
        name: str,
        task: Task,
        options: StepOptions,
        make_engine: Callable[[keras.Model, Batch], Engine],
        num_towers: int,
        *,
        unprepared: bool = False,
        steps_per_execution: int | None = 1,
    ):
        """Args:
        name: name in the registry.
        task: what to train.
        options: how a step computes.
        make_engine: function of (template model, spec of a batch) that returns the engine.
        num_towers: number of towers of all workers, for reports.
        unprepared: whether towers prepare the features if the task supports it (`towers.input.unprepared`).
        steps_per_execution: number of steps in an execution of a graph; None chooses it by the time of a step.
          With several, the engine's step must be one call without collectives.
        """
        self._unprepared, self._late = unprepared, LateReports()
        self.name, self.num_towers = name, num_towers
        self.task, self.options = task, options
        self.model = self._build_template()
        self._check_data()
        self._batches = TrainingBatches(lambda step: self._dataset("train", step))
        # The template is never trained, so only the spec of the input is needed here.
        with readable_placement():
            self.engine = make_engine(self.model, self._batches.spec)
        if steps_per_execution is None and not reads_in_graph(self.engine):
            steps_per_execution = 1  # unrolled steps only if the user asks for a number
        self._length = ExecutionLength(steps_per_execution)
        if (placed := self.engine.placed_input) is not None:
            # The batches of an execution are read before it.
            self.engine.placed_input = dataclasses.replace(placed, ahead=self._length.steps)
        self._executions = Executions(
            self.engine, self.model, options.rate, self._batches, self._next_batch, self._length
        )
        # The options may have left `xla` open.
        self.options = dataclasses.replace(options, xla=bool(self.engine.options.xla))
        self._causes = Causes(task=self.task, model=self.model, all_true=self._all_true)
        self._bad_steps = BadSteps(
            self.engine.counters, self._causes, self._batches.again, on_cpu=self.engine.devices.on_cpu
        )

    def _check_data(self) -> None:
        """Raises UserError if the task's data don't fit its model."""
        check_first_batches(self.task, self.model)

    def _dataset(self, split: str, first_batch: int = 0) -> tf.data.Dataset:
        """This process's part of `split`, as batches."""
        return self._read(split, InputShard(first_batch=first_batch))

    def _read(self, split: str, shard: InputShard) -> tf.data.Dataset:
        with tf.device(HOST):
            return as_batches(read_dataset(self.task, split, shard, unprepared=self._unprepared))

    def _build_template(self) -> keras.Model:
        keras.utils.set_random_seed(self.options.seed)
        # The engine holds the trained parameters, so the template need not use a GPU's memory.
        with tf.device("/device:CPU:0"):
            return built_model(self.task, self.options.precision)

    @property
    def devices(self) -> Devices:
        return self.engine.devices

    is_exact = keeps_files = True
    engine_choice: EngineChoice | None = None
    batch_positions: Sequence[int] | None = None

    @property
    def notices(self) -> list[str]:
        exchanges = self.options.batch_stats == "synced" and len(self.part_shares) > 1
        of_kernels = self.engine.kernels.notices(self.model, exchanges=exchanges)
        recomputed = recomputation.notices(self.model, self.options.recompute)
        compiled = ["XLA compiles the step (xla=False disables this)"] if self.options.xla else []
        return self.engine.notices + of_kernels + recomputed + compiled

    def agree(self, move: Move) -> Move:
        return move

    def agree_to_save(self, wanted: bool) -> bool:
        return wanted

    def begin_saving(self) -> None:
        """Nothing to do: the engine trains these variables themselves."""

    def values(self, pieces: Sequence[Piece]) -> Iterator[tf.Tensor | None]:
        for piece in pieces:
            yield piece.value()

    def restore(self, part: Piece, read: Callable[[Piece], tf.Tensor]) -> None:
        part.variable.assign(read(part))

    def share_restored(self, step: int | None, read: Callable[[Piece], tf.Tensor] | None = None) -> int | None:
        return step

    @property
    def shares_by_worker(self) -> tuple[tuple[float, ...], ...]:
        """Shares of the towers in a global batch, by worker; workers cut the batch first."""
        return (self.engine.parts.all_shares,)

    @property
    def part_shares(self) -> tuple[float, ...]:
        """Share of each tower in a global batch, over all workers."""
        return tuple(share for of_worker in self.shares_by_worker for share in of_worker)

    @property
    def microbatches(self) -> int:
        """Number of microbatches that a global batch is divided into before the towers divide each of them."""
        return self.options.accumulation

    @property
    def step(self) -> int:
        # Reading the counter would wait for all started steps.
        return int(self.engine.counters.step) if self._late.end is None else self._late.end

    @property
    def examples(self) -> int:
        return int(self.engine.counters.examples)

    @property
    def batch_size(self) -> int:
        return self.task.batch_size

    @property
    def steps_per_epoch(self) -> int | None:
        return steps_per_epoch(self.task)

    @property
    def evaluates(self) -> bool:
        return self.task.num_examples("eval") != 0

    @property
    def settings(self) -> dict[str, object]:
        even = len(set(self.part_shares)) == 1
        found = {
            "strategy": self.name,
            "num_towers": self.num_towers,
            "tower_shares": None if even else self.part_shares,
            "batch_size": self.batch_size,
            **self.devices.settings,
            **step_settings(self.options),
            **self.mode_settings(),
        }
        of_task = fields_of(self.task)
        of_task.pop("batch_size", None)
        return found | {f"task.{name}" if name in found else name: value for name, value in of_task.items()}

    def mode_settings(self) -> dict[str, object]:
        """The options that only this mode has, by name."""
        return {}

    def run_steps(self, num_steps: int) -> StepReport:
        assert self._late.end is None, "settle first"
        self._begin()
        first = self.step
        outcomes = on_host([outcome for some in self._executions.started(first, num_steps) for outcome in some])
        return self._reported(first, Arrived(outcomes, time.perf_counter()), self._executions.input_seconds)

    @property
    def _reports_late(self) -> bool:
        """Whether steps begin before earlier outcomes are known; masks skip all updates after a bad step."""
        return self.engine.masked

    def start_steps(self, num_steps: int) -> StepReport | None:
        if not self._reports_late:
            return self.run_steps(num_steps)
        assert num_steps > 0
        if self._late.end is None:
            self._begin()
        first, outcomes, self._executions.input_seconds = self.step, [], 0.0
        for some in self._executions.started(first, num_steps):
            if not outcomes:  # the device continues with these steps while earlier ones are reported
                self._late.read(self._reported)
            outcomes += some
        self._late.add(first, outcomes, self._executions.input_seconds)
        return self._late.take()

    def settle(self) -> StepReport | None:
        return self._late.settle(self._reported)

    def _begin(self) -> None:
        self._bad_steps.check_before()
        self._done_at, self._executions.input_seconds = time.perf_counter(), 0.0

    def _reported(self, first: int, arrived: Arrived, input_seconds: float) -> StepReport:
        """The report of all steps since the last report."""
        outcomes = arrived.outcomes
        self._bad_steps.check(first, outcomes)
        end = first + len(outcomes)
        seconds, self._done_at = arrived.at - self._done_at, arrived.at
        self._length.note(len(outcomes), seconds)
        return report_of(
            outcomes,
            step=end,
            learning_rate=self.options.rate(max(end - 1, 0)),
            seconds=seconds,
            input_seconds=min(input_seconds, seconds),  # the host may wait while earlier steps are computed
        )

    def _next_batch(self, step: int) -> Batch:
        return self._batches.next(step, self.engine.placed_input)

    def _all_true(self, here: bool) -> bool:
        """Whether `here` is true in every process."""
        return here

    def evaluate(
        self, num_batches: int | None = None, *, stop_requested: Callable[[], bool] | None = None
    ) -> dict[str, float] | None:
        sums: dict[str, np.ndarray] = {}
        dataset = self._dataset("eval")
        with readable_errors("evaluation"):
            evaluate = self._evaluator(open_length(dataset.element_spec))
        for batch in readable_batches(dataset, num_batches):
            if stop_requested is not None and not self._all_true(not stop_requested()):
                return None
            with readable_errors("evaluation", self.model, batch):
                result = evaluate(batch)
            for name, value in {"loss": (result.loss_sum, result.weight), **result.metric_sums}.items():
                sums[name] = sums.get(name, 0.0) + np.array([float(part) for part in value])
        if not sums:
            raise UserError("the 'eval' split is empty: it needs at least one example")
        of_all = self._over_all(sums)
        means = {name: mean_of(total, weight) for name, (total, weight) in of_all.items()}
        if not math.isfinite(means["loss"]):
            self._causes.check_evaluation_data(lambda: self._dataset("eval"))
            if not of_all["loss"][1]:
                raise UserError(
                    "the weights of the evaluation data add up to 0, so there is no mean; correct their weights"
                )
        return means

    def _evaluator(self, batch_spec: Batch) -> Callable[[Batch], EvaluationResult]:
        """A function from this process's part of an evaluation batch to its sums."""
        return self.engine.evaluator(batch_spec)

    def _over_all(self, sums: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The sums of an evaluation over all processes, from this process's sums."""
        return sums

    def checkpointables(self) -> dict:
        engine = self.engine
        return {
            "parameters": dict(engine.parameters()),
            "state": dict(engine.state()),
            "slots": {slot: dict(by_name) for slot, by_name in engine.slots().items()},
            "counters": dict(engine.counters.variables()),
        }

    def collect(self) -> None:
        """Nothing to do: the engine trains these variables themselves."""

    def collect_parameters(self) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Nothing to do."""

    def restored(self, positions: Sequence[int] | None = None) -> None:
        self._batches.restart()
        self._late = LateReports()
        self.engine.counters.restart(loss_scaling_for(self.options.precision))

    def finish(self, completed: bool) -> None:
        """Nothing to do: no other process waits for this one."""

    def check_savable(self) -> None:
        check_savable(self.model)

    def portable_model(self) -> keras.Model:
        return portable_model(self.task, self.engine)

    def graph(self) -> tf.Graph:
        return self.engine.graph()
