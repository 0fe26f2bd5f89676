"""A task's model, built to compute in a precision: a model that only float32 suits becomes one line."""

import keras
import tensorflow as tf

from strategies.data_checks.data_errors import reason_of, users_line_of
from towers.errors import UserError
from towers.layers.names import fresh_name_counts
from towers.precision import layer_precision
from towers.task import Task


def built_model(task: Task, precision: str) -> keras.Model:
    """The task's model, whose layers compute in `precision`, with names that count from 0.

    Raises:
      UserError: the model can be built in float32, but not in this precision. Other errors are raised as they are.
    """
    try:
        return _built(task, precision)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        if precision == "float32" or isinstance(error, UserError) or not _suits_float32(task):
            raise
        raise UserError(
            f"the model can't be built with precision={precision}, only in float32: give tensors of its own the "
            f"compute_dtype of their layer, or pass precision=float32 ({reason_of(error)}{users_line_of(error)})"
        ) from error


def _built(task: Task, precision: str) -> keras.Model:
    with layer_precision(precision), fresh_name_counts():
        return task.build_model()


def _suits_float32(task: Task) -> bool:
    try:
        _built(task, "float32")
    except Exception:
        return False
    return True
