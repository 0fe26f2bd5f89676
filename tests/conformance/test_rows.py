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
    Outcome,
    Trial,
    not_finite,
    not_synced,
    outcomes_of,
    twenty_steps,
)
from towers.task import InputShard

TOLERANCE = 1e-5


def reference_of(row: Row, task: SmallImages) -> Outcome:
    """The batch undivided, or where statistics are each part's own, in the same parts."""
    in_parts = row.shares if task.batch_norm and row.batch_stats != "synced" else ()
    return _outcome_of_reference(task, row.reference.microbatches_for(task.batch_norm), in_parts)


@functools.cache
def _outcome_of_reference(task: SmallImages, microbatches: int, in_parts: tuple[float, ...]) -> Outcome:
    strategy, policy = (one_device_in_parts(in_parts), "average") if in_parts else (one_device, "synced")
    return outcomes_of(strategy, twenty_steps(task, policy), microbatches)[-1]


@functools.cache
def outcomes_of_row(row: Row, trial: Trial) -> list[Outcome]:
    if row.ring is not None:
        return outcomes_by_rank(row)[0][trial]
    if row.servers is not None:
        return outcomes_at_the_chief(row)[trial]
    return outcomes_of(row.make_strategy, trial, row.accumulation)


def apart(values, expected) -> dict[str, float]:
    """max|a - b| / max|b| of the variables where it is not within the tolerance; NaN never is."""
    differences = {name: np.abs(values[name] - b).max() / np.abs(b).max() for name, b in expected.items()}
    return {name: float(difference) for name, difference in differences.items() if not difference <= TOLERANCE}


every_row_and_task = pytest.mark.parametrize(
    "row, task", [pytest.param(row, task, id=f"{row.name}-{task.name}") for task in TASKS for row in ROWS]
)


@pytest.fixture
def outcomes(row, task) -> tuple[Outcome, Outcome]:
    """The row's, and that of one device."""
    return outcomes_of_row(row, twenty_steps(task, row.batch_stats))[-1], reference_of(row, task)


@every_row_and_task
def test_parameters_state_and_slots(outcomes):
    outcome, expected = outcomes
    assert outcome.values.keys() == expected.values.keys()
    assert apart(outcome.values, expected.values) == {}


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


divided_rows = [row for row in ROWS if len(row.shares) > 1]


@pytest.mark.parametrize("row", divided_rows, ids=lambda row: row.name)
@pytest.mark.parametrize("batch_stats", NOT_SYNCED)
def test_statistics_that_are_not_synced(row, batch_stats):
    """They are those of each part, so the reference takes the same parts."""
    trial = not_synced(batch_stats)
    (found,) = outcomes_of_row(row, trial)
    (expected,) = outcomes_of(one_device_in_parts(row.shares), trial, row.accumulation)
    assert apart(found.values, expected.values) == {}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_step_that_is_not_finite_changes_nothing(row):
    before, skipped, after = outcomes_of_row(row, not_finite(row.batch_stats))
    assert [outcome.report.skipped for outcome in (before, skipped, after)] == [0, 1, 0]
    for name, value in skipped.values.items():
        np.testing.assert_array_equal(value, before.values[name], err_msg=name)
    assert all(np.isfinite(value).all() for value in after.values.values())
    counters = after.counters
    assert (counters["step"], counters["updates"], counters["skipped"]) == (3, 2, 1)


ring_rows = [row for row in ROWS if row.ring is not None]


@pytest.mark.parametrize("row", ring_rows, ids=lambda row: row.name)
def test_workers_are_bit_identical(row):
    first, *others = outcomes_by_rank(row)
    assert len(others) == row.num_workers - 1
    for other in others:
        for trial, outcomes in first.items():
            for mine, theirs in zip(outcomes, other[trial], strict=True):
                assert mine.evaluation == theirs.evaluation
                for name, value in mine.values.items():
                    assert value.tobytes() == theirs.values[name].tobytes(), name


every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def trained_by_keras(task: SmallImages) -> dict[str, np.ndarray]:
    """The same steps by Keras's own layers, a tape and the formula of momentum, without a line of ours."""
    keras.utils.set_random_seed(3)
    model = task.build_model()
    momenta = {variable.path: np.zeros(variable.shape, np.float32) for variable in model.trainable_variables}
    for batch in task.dataset("train", InputShard()).take(NUM_STEPS):
        with tf.GradientTape() as tape:
            logits = model(batch.features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels["class"], logits)
            loss = tf.reduce_sum(losses * batch.weights) / tf.reduce_sum(batch.weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            momenta[variable.path] = 0.9 * momenta[variable.path] - 0.02 * gradient.numpy()
            variable.assign_add(momenta[variable.path])
    kinds = {"parameters": model.trainable_variables, "state": model.non_trainable_variables}
    found = {f"{kind}/{v.path}": v.numpy() for kind, variables in kinds.items() for v in variables}
    return found | {f"momentum/{path}": value for path, value in momenta.items()}


@every_task
def test_the_reference_is_keras(task):
    found, expected = _outcome_of_reference(task, 1, ()).values, trained_by_keras(task)
    assert found.keys() == expected.keys()
    assert apart(found, expected) == {}


@every_task
def test_the_reference_learns(task):
    """Agreement means something only where numbers moved, and not so wildly that rounding would grow."""
    start = one_device(task, twenty_steps(task, "synced").options(1)).checkpointables()["parameters"]
    outcome = _outcome_of_reference(task, 1, ())
    for name, variable in start.items():
        moved = np.abs(outcome.values[f"parameters/{name}"] - variable.numpy()).max()
        assert moved > 1e-3, f"{name} stayed where it was"
    assert outcome.report.loss < np.log(10) * 1.1


def test_names_are_told_apart():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
