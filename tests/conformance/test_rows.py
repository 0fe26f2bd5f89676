"""Every row of the table gives the numbers of one device: after 20 steps, on every task."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
import pytest

from strategies.contract import StepReport
from tests.conformance.rows import ROWS, Row, one_device
from tests.conformance.tasks import TASKS, SmallImages
from towers.options import StepOptions
from towers.schedules import Constant
from towers.update_rules import Momentum

NUM_STEPS = 20
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a strategy left after its steps, as numpy arrays by 'kind/name'."""

    report: StepReport
    step: int
    evaluation: Mapping[str, float]
    values: Mapping[str, np.ndarray]
    counters: Mapping[str, np.ndarray]


def trained(make_strategy, task: SmallImages, accumulation: int) -> Outcome:
    """20 steps of momentum from the start that the seed gives."""
    options = StepOptions(
        rule=Momentum(momentum=0.9),
        schedule=Constant(0.02),
        batch_stats="synced",
        accumulation=accumulation,
        seed=3,
    )
    strategy = make_strategy(task, options)
    report = strategy.run_steps(NUM_STEPS)
    kept = strategy.checkpointables()
    compared = {"parameters": kept["parameters"], "state": kept["state"], **kept["slots"]}
    return Outcome(
        report=report,
        step=strategy.step,
        evaluation=strategy.evaluate(),
        values={f"{kind}/{name}": v.numpy() for kind, named in compared.items() for name, v in named.items()},
        counters={name: variable.numpy() for name, variable in kept["counters"].items()},
    )


@functools.cache
def outcome_of_reference(task: SmallImages, microbatches: int) -> Outcome:
    return trained(one_device, task, microbatches)


@functools.cache
def outcome_of_row(row: Row, task: SmallImages) -> Outcome:
    return trained(row.make_strategy, task, row.accumulation)


def relative_differences(values, expected) -> dict[str, float]:
    """max|a - b| / max|b| by variable."""
    return {name: np.abs(values[name] - b).max() / np.abs(b).max() for name, b in expected.items()}


every_row_and_task = pytest.mark.parametrize(
    "row, task", [pytest.param(row, task, id=f"{row.name}-{task.name}") for task in TASKS for row in ROWS]
)


@pytest.fixture
def outcomes(row, task) -> tuple[Outcome, Outcome]:
    """The row's, and that of one device."""
    reference = outcome_of_reference(task, row.reference.microbatches_for(task.batch_norm))
    return outcome_of_row(row, task), reference


@every_row_and_task
def test_parameters_state_and_slots(outcomes):
    outcome, expected = outcomes
    assert outcome.values.keys() == expected.values.keys()
    differences = relative_differences(outcome.values, expected.values)
    # NaN is not within anything.
    apart = {name: difference for name, difference in differences.items() if not difference <= TOLERANCE}
    assert not apart


@every_row_and_task
def test_counters(outcomes):
    outcome, _ = outcomes
    assert outcome.step == NUM_STEPS
    assert outcome.counters["step"] == NUM_STEPS
    assert outcome.counters["updates"] == NUM_STEPS
    assert outcome.counters["skipped"] == 0


@every_row_and_task
def test_report(outcomes, task):
    report, expected = outcomes[0].report, outcomes[1].report
    batches = [len(range(start, min(start + 30, task.num_images))) for start in range(0, task.num_images, 30)]
    assert report.examples == sum(batches[step % len(batches)] for step in range(NUM_STEPS))
    assert (report.step, report.num_steps, report.skipped) == (NUM_STEPS, NUM_STEPS, 0)
    assert report.learning_rate == 0.02
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=TOLERANCE)
    assert report.metrics == pytest.approx(expected.metrics, rel=1e-6)


@every_row_and_task
def test_evaluation(outcomes, task):
    evaluation, expected = outcomes[0].evaluation, outcomes[1].evaluation
    assert evaluation["total_examples"] == task.num_images
    assert evaluation["total_weight"] == expected["total_weight"] == task.total_weight("eval")
    assert evaluation["accuracy"] == expected["accuracy"]
    assert evaluation["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_reference_learns(task):
    """Agreement means something only where numbers moved, and not so wildly that rounding would grow."""
    start = one_device(task, StepOptions(seed=3)).checkpointables()["parameters"]
    outcome = outcome_of_reference(task, 1)
    for name, variable in start.items():
        moved = np.abs(outcome.values[f"parameters/{name}"] - variable.numpy()).max()
        assert moved > 1e-3, f"{name} stayed where it was"
    assert outcome.report.loss < np.log(10) * 1.1


def test_names_are_told_apart():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
