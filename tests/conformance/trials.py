"""The trials of every row and their outcomes: plain data, so that other processes can do the work."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from strategies.contract import StepReport, Strategy
from tests.conformance.rows import Row
from tests.conformance.tasks import BATCH_NORM_LAST_1, INCEPTION, NAN_IN_BATCH_1, TASKS, SmallTask
from towers.options import StepOptions
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant

NUM_STEPS = 20
RATE = 0.02


@dataclasses.dataclass(frozen=True)
class Trial:
    """Some training steps on a task, with momentum unless `others` says otherwise, from weights of a fixed seed.

    Attributes:
      task: the task to train.
      calls: number of steps in each call of run_steps.
      batch_stats, on_nan: options of the step.
      others: further options of the step, as (name, value).
    """

    task: SmallTask
    calls: tuple[int, ...] = (NUM_STEPS,)
    batch_stats: str = "synced"
    on_nan: str = "stop"
    others: tuple[tuple[str, object], ...] = ()

    def options(self, accumulation: int) -> StepOptions:
        usual = StepOptions(
            rule=Momentum(momentum=0.9),
            schedule=Constant(RATE),
            accumulation=accumulation,
            batch_stats=self.batch_stats,
            precision=self.task.precision,
            on_nan=self.on_nan,
            seed=3,
        )
        return dataclasses.replace(usual, **dict(self.others))


def twenty_steps(task: SmallTask, batch_stats: str, others: tuple[tuple[str, object], ...] = ()) -> Trial:
    return Trial(task, batch_stats=batch_stats, others=others)


# Each part has its own statistics, and those of the first part are kept. Three steps are an epoch; its last batch
# has one example.
FIRST_PARTS_STATISTICS = Trial(BATCH_NORM_LAST_1, (3,), batch_stats="first")


def not_finite(batch_stats: str) -> Trial:
    """The second batch is not finite: only its last part, or with synced statistics every part."""
    return Trial(NAN_IN_BATCH_1, (1, 1, 1), on_nan="skip", batch_stats=batch_stats)


def tasks_of(row: Row) -> Sequence[SmallTask]:
    """The tasks that the full tests try with a row."""
    if row.every_task:
        return TASKS
    others = {
        FLOAT32_TASK: row.float32,
        TRANSFORMER: row.transformer or row.every_trial,
        INCEPTION: row.branches,
    }
    return QUICK_TASK, *(task for task, is_tried in others.items() if is_tried)


def trials_of(row: Row, only_quick: bool) -> list[Trial]:
    """The trials of a row: all, or those of the quick tests."""
    if only_quick:
        quick = [twenty_steps(QUICK_TASK, row.batch_stats, row.options)]
        return quick + [not_finite(row.batch_stats)] * row.not_finite_in_quick
    found = [twenty_steps(task, row.batch_stats, row.options) for task in tasks_of(row)]
    if row.every_trial:
        found += map(not_finite, policies_to_try(row))
        found += [FIRST_PARTS_STATISTICS] * has_several_parts(row)
    return found


def policies_to_try(row: Row) -> Sequence[str]:
    """The policies for statistics with which the trials use a batch that is not finite."""
    both = has_several_parts(row) and row.batch_stats != "average"
    return (row.batch_stats, "average") if both else (row.batch_stats,)


def has_several_parts(row: Row) -> bool:
    """Whether there are several parts, among whose statistics a policy chooses."""
    return len(row.shares) > 1


# Tests idle towers, empty microbatches and batch norm at the same time.
QUICK_TASK = BATCH_NORM_LAST_1
FLOAT32_TASK, TRANSFORMER = TASKS[-2:]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The state of a strategy after a call of run_steps, with the arrays of this process by 'kind/name'.

    It is evaluated after NUM_STEPS alone: tracing that takes as long as 20 steps.
    """

    report: StepReport
    step: int
    evaluation: Mapping[str, float] | None
    values: Mapping[str, np.ndarray]
    counters: Mapping[str, np.ndarray]


def outcomes_of(
    make_strategy: Callable[..., Strategy], trial: Trial, accumulation: int = 1, **joined
) -> list[Outcome]:
    """The outcome of each call of run_steps."""
    strategy = make_strategy(trial.task, trial.options(accumulation), **joined)
    found = [_outcome(strategy, strategy.run_steps(num_steps)) for num_steps in trial.calls]
    strategy.finish(completed=True)
    return found


def _outcome(strategy: Strategy, report: StepReport) -> Outcome:
    strategy.collect()
    kept = strategy.checkpointables()
    compared = {"parameters": kept["parameters"], "state": kept["state"], **kept["slots"]}
    return Outcome(
        report=report,
        step=strategy.step,
        evaluation=strategy.evaluate() if strategy.step == NUM_STEPS else None,
        values={
            f"{kind}/{name}": variable.numpy()
            for kind, named in compared.items()
            for name, variable in named.items()
            if getattr(variable, "is_here", True)
        },
        counters={name: variable.numpy() for name, variable in kept["counters"].items()},
    )
