"""Checks the first batch of each split against the model before training: a mistake in the data gives one line.

On the host, without training, the model computes some examples of the batch, and the task their loss and metrics.
"""

import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from strategies.contract import RESERVED_NAMES
from strategies.data_checks.batch_checksums import BatchChecksums, first_batches
from strategies.data_checks.data_errors import is_users_file, out_of_range, reason_of
from towers.errors import UserError
from towers.task import Batch, Task

# The end of the error for negative weights.
ARE_BELOW_0 = "are below 0: a weight is how much an example counts, so it must be at least 0"
_NUM_EXAMPLES = 8
# The names that tf.name_scope accepts.
_NAME = re.compile(r"[A-Za-z0-9_.\\/>-]*")


def check_first_batches(task: Task, model: keras.Model, *, num_compared: int = 1) -> Mapping[str, BatchChecksums]:
    """Checks the batch size, and the first batch of each split unless the task has checked its data itself.

    Args:
      task: what to train. `task.data_is_checked`, if it has this attribute, says that no batch need be read.
      model: the task's model, which is not changed.
      num_compared: number of batches of each split to read; several batches are read twice.

    Returns:
      By split, the checksums of the batches that were read.

    Raises:
      UserError: the data don't fit; the message says what came, what was expected and how to fix it.
    """
    num_examples = task.num_examples("train")
    if num_examples is not None and num_examples < task.batch_size:
        raise UserError(
            f"batch_size={task.batch_size}: there are {num_examples} training examples; "
            f"use at most batch_size={num_examples}"
        )
    if getattr(task, "data_is_checked", False):
        return {}
    with tf.device("/device:CPU:0"):
        _check_penalties(model)
    _check_names(model)
    _check_encodings(model)
    found = {}
    for split in ("train", "eval"):
        if split == "train" or task.num_examples(split) != 0:
            with tf.device("/device:CPU:0"):
                batches = first_batches(task, split, num_compared)
                again = first_batches(task, split, num_compared) if num_compared > 1 else None
                found[split] = BatchChecksums.of(batches, again)
                _check_first_batch(task, model, split, batches[0])
    return found


def not_finite_parts(batch: Batch) -> list[str]:
    """Which of 'features', 'labels' and 'weights' hold NaN or infinity."""

    def is_finite(tensor) -> bool:
        array = np.asarray(tensor)
        return array.dtype.kind in "OSUbiu" or bool(np.isfinite(array.astype(np.float64)).all())

    parts = zip(("features", "labels", "weights"), batch, strict=True)
    return [name for name, part in parts if not all(map(is_finite, tf.nest.flatten(part)))]


def _check_first_batch(task: Task, model: keras.Model, split: str, batch: Batch) -> None:
    if split == "train":
        _check_length(task, _length(batch))
    _check_parts(split, batch)
    few = tf.nest.map_structure(lambda tensor: tensor[:_NUM_EXAMPLES], batch)
    given, taken = _described(few.features), _taken(model)
    if taken is not None and given.replace("64", "32") == taken.replace("64", "32"):
        problem = f"the model fails on the first batch of {split!r}, features {given}: correct the model, or give "
        problem += "features that it accepts"
    else:
        takes = f", and the model takes {taken}" if taken else ""
        problem = f"the first batch of {split!r} has features {given}{takes}: give features of the model's inputs"
    if _are_more(few.features, model) or _loses_imaginary_parts(few.features, model):
        raise UserError(problem)
    outputs = _computed(lambda: _outputs(model, few.features), problem)
    _check_outputs(outputs)
    came = f"the first batch of {split!r} has labels {_described(few.labels)}{_weights_of(few)}, and the model "
    came += f"returns {_described(outputs)}"
    wrong_loss = f"{came}: give labels and weights that fit outputs and loss"
    # Training data were checked before: what the task refuses now is in the data of this split.
    where = f"the first batch of {split!r}: " if split == "eval" else ""
    _computed(lambda: task.loss(outputs, few), wrong_loss, reads_labels=True, where=where)
    wrong_metrics = f"{came}: give metrics that fit labels and outputs"
    metrics = _computed(lambda: task.metrics(outputs, few), wrong_metrics, reads_labels=True, where=where)
    for name in sorted(RESERVED_NAMES.intersection(metrics or ())):
        raise UserError(f"a metric is named {name!r}, a field that each report has already: rename the metric")


def _check_outputs(outputs: Any) -> None:
    """Raises UserError for a model that returns no tensors, for example from a call without `return`."""
    wrong = [part for part in tf.nest.flatten(outputs) or [outputs] if not hasattr(part, "shape")]
    if wrong:
        raise UserError(
            f"the model returns a {type(wrong[0]).__name__}: must return tensors, in lists, tuples or dicts; "
            "correct what its call returns"
        )


def _check_penalties(model: keras.Model) -> None:
    """Raises UserError if a regularizer can't be computed, like Keras's OrthogonalRegularizer in float64."""
    precision = model.compute_dtype
    in_float32 = "" if precision == "float32" else f", or pass precision=float32 instead of {precision}"
    problem = f"a regularizer of the model's weights fails: correct or remove it{in_float32}"
    _computed(lambda: list(model.losses), problem)


def _check_names(model: keras.Model) -> None:
    """Raises UserError for layers whose names can't be in a TensorFlow graph. Called eagerly they work."""
    called = [layer for layer in model._flatten_layers() if not isinstance(layer, keras.layers.InputLayer)]
    wrong = next((layer.name for layer in called if not _NAME.fullmatch(layer.name)), None)
    if wrong is not None:
        raise UserError(
            f"a layer is named {wrong!r}: TensorFlow's graphs take letters, digits and _ . - / > only; rename it"
        )


def _check_encodings(model: keras.Model) -> None:
    """Raises UserError for a layer whose sparse outputs Keras can compute eagerly, but not in a graph."""
    encodings = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.CategoryEncoding)]
    sparse = next((layer.name for layer in encodings if layer.sparse), None)
    if sparse is not None:
        raise UserError(
            f"layer {sparse!r}, a CategoryEncoding, has sparse=True: in TensorFlow's graphs Keras computes dense "
            "encodings only; give it sparse=False"
        )


def _check_parts(split: str, batch: Batch) -> None:
    """Raises UserError for invalid weights, and for parts of different lengths."""
    if "weights" in not_finite_parts(Batch((), (), batch.weights)):
        raise UserError(f"weights of the first batch of {split!r} hold NaN or infinity: clean the data")
    weights = [np.asarray(tensor) for tensor in tf.nest.flatten(batch.weights)]
    if any(array.dtype.kind in "fi" and (array < 0).any() for array in weights):
        raise UserError(f"weights of the first batch of {split!r} {ARE_BELOW_0}; correct the weights")


def _check_length(task: Task, length: int) -> None:
    if length != task.batch_size:
        raise UserError(
            f"batch_size={task.batch_size}: the first batch of 'train' has {length} examples; "
            f"pass batch_size={length}, or make batches of {task.batch_size}"
        )


def _length(batch: Batch) -> int:
    return int(tf.nest.flatten(batch.features)[0].shape[0])


def _outputs(model: keras.Model, features: Any) -> Any:
    with keras.StatelessScope():
        return model(features, training=False)


def _are_more(features: Any, model: keras.Model) -> bool:
    """Whether there are more tensors than the model has inputs: a Sequential model ignores all but the first.

    A dict may have more entries, because the model selects them by name.
    """
    inputs = getattr(model, "inputs", None)
    return bool(inputs) and not isinstance(features, Mapping) and len(tf.nest.flatten(features)) > len(inputs)


def _loses_imaginary_parts(features: Any, model: keras.Model) -> bool:
    """Whether Keras would cast complex features to the model's real inputs."""
    inputs = getattr(model, "inputs", None) or ()

    def are_complex(tensors) -> bool:
        return any(tf.as_dtype(tensor.dtype).is_complex for tensor in tensors)

    return bool(inputs) and are_complex(tf.nest.flatten(features)) and not are_complex(inputs)


def _computed(function: Callable[[], Any], problem: str, *, reads_labels: bool = False, where: str = "") -> Any:
    """The result of `function`.

    If it reads labels, None for a label out of range, which training reports with its step. `where` is put before
    errors that the function itself raises.

    Raises:
      UserError: Keras or TensorFlow refuses the data. An error in the user's code is raised unchanged.
    """
    try:
        return function()
    except UserError as error:
        if not where:
            raise
        raise UserError(f"{where}{error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, tf.errors.OpError) as error:
        if reads_labels and out_of_range(error, "", only_labels=True) is not None:
            return None
        if not _is_refused_by_library(error):
            raise
        raise UserError(f"{problem} ({reason_of(error)})") from error


def _is_refused_by_library(error: Exception) -> bool:
    return not is_users_file(traceback.extract_tb(error.__traceback__)[-1].filename)


def _taken(model: keras.Model) -> str | None:
    """The types and shapes of the model's inputs; None if they are unknown, as for a subclassed model."""
    inputs = getattr(model, "inputs", None)
    return _described(inputs[0] if len(inputs) == 1 else inputs) if inputs else None


def _weights_of(batch: Batch) -> str:
    return f" and weights {_described(batch.weights)}" if tf.nest.flatten(batch.weights) else ""


def _described(structure: Any) -> str:
    """Types and shapes, as 'float32 [N, 20]' or {'a': 'int32 [N]'}."""
    if isinstance(structure, dict):
        return "{" + ", ".join(f"{name!r}: {_described(part)}" for name, part in structure.items()) + "}"
    if isinstance(structure, list | tuple):
        return "(" + ", ".join(map(_described, structure)) + ")" if structure else "none"
    dtype = getattr(structure.dtype, "name", structure.dtype)
    return f"{dtype} [{', '.join(['N', *map(str, structure.shape[1:])])}]"
