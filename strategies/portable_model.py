"""The trained model as an independent Keras model, whatever mode trained it."""

import json

import keras
import tensorflow as tf

from towers.devices import HOST
from towers.engine import Engine
from towers.errors import UserError
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


def check_savable(model: keras.Model) -> None:
    """Checks that Keras can write a model to a file, so that a run finds out before its first step.

    Raises:
      UserError: Keras does not know the configuration of a class, for example of a keras.Model with arguments and
        without get_config().
    """
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise UserError(
            f"model {model.name!r} can't be saved as model.keras ({reason}): give the class that this names "
            "a get_config()"
        ) from error
