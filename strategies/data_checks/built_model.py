"""Builds a task's model in a precision; a model that works only in float32 gives an error of one line."""

import logging

import keras
import tensorflow as tf

from strategies.data_checks.data_errors import reason_of, users_line_of
from towers.errors import UserError
from towers.layers.names import fresh_name_counts
from towers.precision import layer_precision, precision_of
from towers.task import Task

log = logging.getLogger(__name__)


def built_model(task: Task, precision: str) -> keras.Model:
    """The task's model, whose layers compute in `precision`, with names that count from 0.

    Raises:
      UserError: the model can be built in float32, but not in this precision. Other errors are raised as they are.
    """
    _warn_of_other_policy(precision)
    try:
        return _built(task, precision)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        if precision == "float32" or isinstance(error, UserError) or not _suits_float32(task):
            raise
        raise UserError(
            f"the model can't be built with precision={precision}, only in float32: give tensors that it makes "
            "the compute_dtype of their layer, or pass precision=float32 "
            f"({reason_of(error)}{users_line_of(error)})"
        ) from error


def _warn_of_other_policy(precision: str) -> None:
    """Warns that a Keras dtype policy set by the user has no effect. A verification computes in float64 anyway."""
    policy = keras.config.dtype_policy().name
    if precision_of(policy) not in ("float32", precision) and precision != "float64":
        log.warning(
            "Keras's dtype policy %s has no effect: layers compute in precision=%s; pass precision=%s instead",
            policy,
            precision,
            precision_of(policy) or "float32, bfloat16 or float16",
        )


def _built(task: Task, precision: str) -> keras.Model:
    with layer_precision(precision), fresh_name_counts():
        return task.build_model()


def _suits_float32(task: Task) -> bool:
    try:
        _built(task, "float32")
    except Exception:
        return False
    return True
