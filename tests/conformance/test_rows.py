"""Every row of the table gives the numbers of one device: after 20 steps, on every task."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.ring_rows import outcomes_by_rank
from tests.conformance.rows import ROWS, Row, one_device, one_device_in_parts
from tests.conformance.server_rows import outcomes_at_the_chief
from tests.conformance.tasks import TASKS, SmallImages
from tests.conformance.trials import (
    NOT_SYNCED,
    NUM_STEPS,
    QUICK_TASK,
    RATE,
    Outcome,
    Trial,
    not_finite,
    not_synced,
    outcomes_of,
    trials_of,
    twenty_steps,
)
from towers.precision import layer_precision
from towers.task import InputShard

# Relative, of each variable. In float64 rounding stays a thousand times below.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


def reference_of(row: Row, task: SmallImages) -> Outcome:
    """One device on the undivided batch, or on the same parts if each part has its own statistics."""
    in_parts = row.shares if task.batch_norm and row.batch_stats != "synced" else ()
    return _outcome_of_reference(task, row.reference.microbatches_for(task.batch_norm), in_parts)


@functools.cache
def _outcome_of_reference(task: SmallImages, microbatches: int, in_parts: tuple[float, ...]) -> Outcome:
    strategy, policy = (one_device_in_parts(in_parts), "average") if in_parts else (one_device, "synced")
    return outcomes_of(strategy, twenty_steps(task, policy), microbatches)[-1]


def outcomes_of_row(row: Row, trial: Trial) -> list[Outcome]:
    """The outcomes of a trial. The processes of a row run once for its quick trials, and once for all others."""
    if row.ring is not None:
        return outcomes_by_rank(row, _is_quick(row, trial))[0][trial]
    if row.servers is not None:
        return outcomes_at_the_chief(row, _is_quick(row, trial))[trial]
    return outcomes_of(row.make_strategy, trial, row.accumulation)


def _is_quick(row: Row, trial: Trial) -> bool:
    return row.in_quick and trial in trials_of(row.batch_stats, only_quick=True)


def case(row: Row, *values, is_quick: bool, name: str):
    """A case of a parametrized test; the cases of a row run in the same process and share its outcomes."""
    marks = [pytest.mark.xdist_group(row.name), *([] if is_quick else [pytest.mark.full])]
    return pytest.param(row, *values, marks=marks, id=name)


def cases_of(rows=ROWS, *, only_full: bool = False):
    """A case for each row."""
    return [case(row, is_quick=row.in_quick and not only_full, name=row.name) for row in rows]


def apart(values, expected, tolerance: float) -> dict[str, float]:
    """max|a - b| / max|b| of the variables for which it exceeds the tolerance or is NaN."""
    differences = {name: np.abs(values[name] - b).max() / np.abs(b).max() for name, b in expected.items()}
    return {name: float(difference) for name, difference in differences.items() if not difference <= tolerance}


@pytest.mark.parametrize(
    "row, task",
    [
        case(row, task, is_quick=row.in_quick and task == QUICK_TASK, name=f"{row.name}-{task.name}")
        for row in ROWS
        for task in TASKS
    ],
)
def test_row_equals_one_device(row, task):
    outcome, expected = outcomes_of_row(row, twenty_steps(task, row.batch_stats))[-1], reference_of(row, task)
    tolerance = TOLERANCE[task.precision]
    assert outcome.values.keys() == expected.values.keys()
    assert apart(outcome.values, expected.values, tolerance) == {}
    assert outcome.step == NUM_STEPS
    assert {name: outcome.counters[name] for name in ("step", "updates", "skipped")} == {
        "step": NUM_STEPS,
        "updates": NUM_STEPS,
        "skipped": 0,
    }
    check_report(outcome.report, expected.report, task)
    check_evaluation(outcome.evaluation, expected.evaluation, task)


def check_report(report, expected, task):
    """Reported numbers are float32 sums, whatever the layers compute in."""
    batches = [len(range(start, min(start + 30, task.num_images))) for start in range(0, task.num_images, 30)]
    assert report.examples == sum(batches[step % len(batches)] for step in range(NUM_STEPS))
    assert (report.step, report.num_steps, report.skipped) == (NUM_STEPS, NUM_STEPS, 0)
    assert report.learning_rate == RATE
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
    assert report.metrics == pytest.approx(expected.metrics, rel=1e-6)


def check_evaluation(evaluation, expected, task):
    assert evaluation["total_examples"] == task.num_images
    assert evaluation["total_weight"] == expected["total_weight"] == task.total_weight("eval")
    assert evaluation["accuracy"] == expected["accuracy"]
    assert evaluation["loss"] == pytest.approx(expected["loss"], rel=1e-6)


divided_rows = [row for row in ROWS if len(row.shares) > 1]


@pytest.mark.parametrize("row", cases_of(divided_rows, only_full=True))
@pytest.mark.parametrize("batch_stats", NOT_SYNCED)
def test_statistics_that_are_not_synced(row, batch_stats):
    """Each part has its own statistics, so the reference computes the same parts."""
    trial = not_synced(batch_stats)
    (found,) = outcomes_of_row(row, trial)
    (expected,) = outcomes_of(one_device_in_parts(row.shares), trial, row.accumulation)
    assert apart(found.values, expected.values, TOLERANCE[trial.task.precision]) == {}


@pytest.mark.parametrize("row", cases_of())
def test_a_step_that_is_not_finite_changes_nothing(row):
    before, skipped, after = outcomes_of_row(row, not_finite(row.batch_stats))
    assert [outcome.report.skipped for outcome in (before, skipped, after)] == [0, 1, 0]
    for name, value in skipped.values.items():
        np.testing.assert_array_equal(value, before.values[name], err_msg=name)
    assert all(np.isfinite(value).all() for value in after.values.values())
    counters = after.counters
    assert (counters["step"], counters["updates"], counters["skipped"]) == (3, 2, 1)


ring_rows = [row for row in ROWS if row.ring is not None]


@pytest.mark.parametrize("row", cases_of(ring_rows, only_full=True))
def test_workers_are_bit_identical(row):
    check_bit_identical(row, only_quick=False)


@pytest.mark.parametrize("row", cases_of([row for row in ring_rows if row.in_quick]))
def test_workers_of_the_quick_trials_are_bit_identical(row):
    check_bit_identical(row, only_quick=True)


def check_bit_identical(row, only_quick):
    first, *others = outcomes_by_rank(row, only_quick)
    assert len(others) == row.num_workers - 1
    for other in others:
        for trial, outcomes in first.items():
            for mine, theirs in zip(outcomes, other[trial], strict=True):
                assert mine.evaluation == theirs.evaluation
                for name, value in mine.values.items():
                    assert value.tobytes() == theirs.values[name].tobytes(), name


every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def trained_by_keras(task: SmallImages) -> dict[str, np.ndarray]:
    """The same steps by Keras's own layers, a tape and the formula of momentum, without our code."""
    keras.utils.set_random_seed(3)
    with layer_precision(task.precision):
        model = task.build_model()
    momenta = {variable.path: np.zeros(variable.shape, variable.dtype) for variable in model.trainable_variables}
    for batch in task.dataset("train", InputShard()).take(NUM_STEPS):
        with tf.GradientTape() as tape:
            logits = model(batch.features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels["class"], logits)
            weights = tf.cast(batch.weights, losses.dtype)
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            momenta[variable.path] = 0.9 * momenta[variable.path] - RATE * gradient.numpy()
            variable.assign_add(momenta[variable.path])
    kinds = {"parameters": model.trainable_variables, "state": model.non_trainable_variables}
    found = {f"{kind}/{v.path}": v.numpy() for kind, variables in kinds.items() for v in variables}
    return found | {f"momentum/{path}": value for path, value in momenta.items()}


@every_task
def test_the_reference_is_keras(task):
    found, expected = _outcome_of_reference(task, 1, ()).values, trained_by_keras(task)
    assert found.keys() == expected.keys()
    # The learning rate is fed as a float32 number; Keras's is a float64 one here.
    assert apart(found, expected, 1e-5) == {}


@every_task
def test_the_reference_learns(task):
    """Agreement means something only if the numbers moved."""
    start = one_device(task, twenty_steps(task, "synced").options(1)).checkpointables()["parameters"]
    outcome = _outcome_of_reference(task, 1, ())
    for name, variable in start.items():
        moved = np.abs(outcome.values[f"parameters/{name}"] - variable.numpy()).max()
        assert moved > 1e-3, f"{name} did not change"
    assert outcome.report.loss < np.log(10) * 1.1
