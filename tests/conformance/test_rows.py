"""Tests the rows of one process, and the reference that all rows are compared with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.row_checks import apart, outcome_of_reference, row_checks
from tests.conformance.rows import ROWS, one_device
from tests.conformance.tasks import TASKS, SmallTask
from tests.conformance.trials import NUM_STEPS, QUICK_TASK, RATE, twenty_steps
from towers.precision import layer_precision
from towers.task import InputShard

TestRows = row_checks([row for row in ROWS if row.ring is None and row.servers is None])

every_task = pytest.mark.parametrize(
    "task",
    [pytest.param(task, id=task.name, marks=[] if task == QUICK_TASK else [pytest.mark.full]) for task in TASKS],
)


def trained_by_keras(task: SmallTask) -> dict[str, np.ndarray]:
    """The same steps by Keras's own layers, a tape and the formula of momentum, without our code."""
    keras.utils.set_random_seed(3)
    with layer_precision(task.precision):
        model = task.build_model()
    momenta = {variable.path: np.zeros(variable.shape, variable.dtype) for variable in model.trainable_variables}
    for batch in task.dataset("train", InputShard()).take(NUM_STEPS):
        with tf.GradientTape() as tape:
            losses, weights = task.losses_and_weights(model(batch.features, training=True), batch)
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            momenta[variable.path] = 0.9 * momenta[variable.path] - RATE * tf.convert_to_tensor(gradient).numpy()
            variable.assign_add(momenta[variable.path])
    kinds = {"parameters": model.trainable_variables, "state": model.non_trainable_variables}
    found = {f"{kind}/{v.path}": v.numpy() for kind, variables in kinds.items() for v in variables}
    return found | {f"momentum/{path}": value for path, value in momenta.items()}


@every_task
def test_the_reference_equals_keras(task):
    found, expected = outcome_of_reference(task, 1, ()).values, trained_by_keras(task)
    assert found.keys() == expected.keys()
    # The reference gets its learning rate in float32; Keras's is in float64 here.
    assert apart(found, expected, 1e-5) == {}


@every_task
def test_the_reference_learns(task):
    """The parameters change: otherwise equal numbers would prove nothing."""
    start = one_device(task, twenty_steps(task, "synced").options(1)).checkpointables()["parameters"]
    outcome = outcome_of_reference(task, 1, ())
    for name, variable in start.items():
        moved = np.abs(outcome.values[f"parameters/{name}"] - variable.numpy()).max()
        assert moved > 1e-3, f"{name} did not change"
    assert outcome.report.loss < np.log(10) * 1.1
