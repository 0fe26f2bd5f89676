"""The trained model as a Keras model of its own, whatever the mode that trained it."""

import keras
import tensorflow as tf

from towers.devices import HOST
from towers.engine import Engine
from towers.layers.computed_constants import compute_constants
from towers.precision import layer_precision
from towers.task import Task
from towers.tower import ModelVariables


def portable_model(task: Task, engine: Engine) -> keras.Model:
    """A new float32 model of a task, on the CPU, with an engine's current parameters and state."""
    with tf.device("/device:CPU:0"), layer_precision("float32"):
        model = task.build_model()
    variables = ModelVariables.of(model)
    for templates, values in (
        (variables.parameters, engine.parameters()),
        (variables.state, engine.state()),
    ):
        # Matched by order: the names of unnamed layers differ between two models of the same process.
        for template, value in zip(templates, values.values(), strict=True):
            with tf.device(HOST):
                template.assign(tf.convert_to_tensor(value))
    with tf.device(HOST):
        compute_constants(model)
    return model
