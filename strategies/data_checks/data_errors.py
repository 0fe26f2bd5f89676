"""Turns TensorFlow's errors that a user's data, input pipeline or batch size caused into one line."""

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.errors import UserError, without_operations
from towers.input.placed_batch import parts_of
from towers.xla_choice import conversion_reason

_LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Only these folders, because a user's program may be in a checkout of this project too.
_OWN = tuple(os.path.join(_ROOT, room, "") for room in ("launch", "models", "strategies", "towers"))
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_INDEX = re.compile(r"indices\[[\d,]*\] = (-?\d+) is not in \[0, (\d+)\)")
# The shape of a tensor and its device, or the size of what a compiled function (XLA) needs at once.
_NO_MEMORY = re.compile(
    r"OOM when allocating tensor with shape(?P<shape>\[[\d,]*\]).*?device:(?P<device>\w+:\d+)"
    r"|Out of memory while trying to allocate (?P<size>[\d.]+ ?\w+)"
)
# A copy to a device without memory, as that of a parameter's first value.
_NOT_COPIED = re.compile(r" to \S*device:(?P<device>\w+:\d+) in order to run .*Dst tensor is not initialized")
# Matches if the function is a tower's pass, not one of our own kernels.
_NOT_COMPILED = re.compile(
    r"(tf2xla conversion failed while converting|trying to compile graph) __inference__train_"
)
# The start of a graph's error: the operations that failed, each with the lines that created it, and their number.
_OF_GRAPH = re.compile(
    r"\AGraph execution error:\s+"
    r"(Detected at node .* defined at \(most recent call last\):\n(<stack traces unavailable>\n|  File .*\n|\n)*)+"
    r"(\d+ root error\(s\) found\.\n\s*\(0\) \w+:\s+)?"
)
_LONGEST = 200


def user_error_in(error: tf.errors.OpError) -> UserError | None:
    """The UserError whose text is in TensorFlow's error: raised by a host function, or in an assertion."""
    found = re.search(r"UserError: ([^\]\n]*)", str(error))
    return None if found is None else UserError(found.group(1))


@contextlib.contextmanager
def readable_errors(
    where: str, model: keras.Model | None = None, batch: Any | Callable[[], Any] = ()
) -> Iterator[None]:
    """Context manager: raises errors about data, memory, XLA, or values needed during tracing in one line.

    Args:
      where: the step, for the message.
      model: the model that computes; None if its inputs are not compared with the batch.
      batch: the batch or batches that it computes, or a function that reads them.
    """
    try:
        with readable_tracing(where):
            yield
    except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as error:
        found = known_cause(error, where)
        found = found or _of_other_shape(where, model, batch() if callable(batch) else batch)
        if found is not None:
            raise found from error
        raise


@contextlib.contextmanager
def readable_tracing(where: str) -> Iterator[None]:
    """Context manager: raises a UserError if a user's code needs values of tensors in a graph, which have none.

    First batches are checked eagerly, where tensors have values and such code works.

    Args:
      where: the step, for the message.
    """
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError) as error:
        line = users_line_of(error)
        if not line or _is_ours(error) or "symbolic" not in str(error).lower():
            raise
        reason = reason_of(error).partition(". ")[0]
        raise UserError(
            f"{where}{line}: {reason}: a step is traced as a graph, whose tensors have no values then; use "
            "keras.ops.where or keras.ops.cond instead of `if`, keras.ops instead of NumPy, float() and numpy()"
        ) from error


def known_cause(error: tf.errors.OpError, where: str) -> UserError | None:
    """The UserError for a step's error whose text names a mistake of the user; None if it names none.

    Args:
      error: TensorFlow's.
      where: the step, for the message.
    """
    return _not_compiled(error) or out_of_range(error, where) or _no_memory(error, where)


@contextlib.contextmanager
def readable_placement() -> Iterator[None]:
    """Context manager: raises the error of a device without memory for parameters and slots in one line."""
    try:
        yield
    except (tf.errors.ResourceExhaustedError, tf.errors.InternalError) as error:
        copied = _NOT_COPIED.search(str(error))
        lacks = f"no memory on {copied['device'].lower()}" if copied else _lacking(error)
        if lacks is None:
            raise
        raise UserError(
            f"parameters and optimizer state: {lacks}; divide them by zero=3 over several devices of strategy "
            "'towers' or several workers of strategy 'ring', or use a smaller model"
        ) from error


def _no_memory(error: tf.errors.OpError, where: str) -> UserError | None:
    """The UserError for a step on a device without enough memory; None if this is another error."""
    lacks = _lacking(error)
    fix = "use accumulation=2, recompute='blocks' or a smaller batch"
    return None if lacks is None else UserError(f"{where}: {lacks}; {fix}")


def _lacking(error: tf.errors.OpError) -> str | None:
    """The memory that a device lacks, as 'no memory on gpu:3 for ...'; None if this is another error."""
    found = _NO_MEMORY.search(str(error))
    if found is None:
        return None
    needed = found["size"] or f"a tensor of shape {found['shape']}"
    on = f" on {found['device'].lower()}" if found["device"] else ""
    return f"no memory{on} for {needed}"


def _not_compiled(error: tf.errors.OpError) -> UserError | None:
    """The UserError for a pass that XLA can't compile; None if this is another error."""
    if not _NOT_COMPILED.search(str(error)):
        return None
    reason = conversion_reason(str(error))
    return UserError(f"xla=True: XLA can't compile the model's training pass: {reason}; use xla=False")


def _of_other_shape(where: str, model: keras.Model | None, batch: Any) -> UserError | None:
    """The UserError for features that don't fit the model's inputs; None if they fit, or if nothing is known."""
    inputs = getattr(model, "inputs", None) or ()  # None for a subclassed model
    for one in parts_of(batch):
        features = tf.nest.flatten(one.features)
        for given, wanted in zip(features, inputs, strict=True) if len(features) == len(inputs) else ():
            if not _fits(given.shape[1:], wanted.shape[1:]):
                return UserError(
                    f"{where}: the features of a batch have shape {_shape(given)}, and the model takes "
                    f"{_shape(wanted)}: correct the data, or the tf.data dataset"
                )
    return None


def _fits(given: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(given) == len(wanted) and all(size in (None, own) for own, size in zip(given, wanted, strict=True))


def _shape(tensor: Any) -> str:
    return f"[{', '.join(['N', *map(str, tensor.shape[1:])])}]"


def out_of_range(error: tf.errors.OpError, where: str, *, only_labels: bool = False) -> UserError | None:
    """The UserError for a label or an id out of range; None if this is another error.

    Args:
      error: TensorFlow's.
      where: the step, for the message.
      only_labels: whether only a loss was computed. A deterministic cross-entropy looks labels up as ids.
    """
    found = _LABEL.search(str(error)) or (_INDEX.search(str(error)) if only_labels else None)
    if found:
        label, count = found.groups()
        return UserError(
            f"{where}: label {label} is out of range: the outputs have {count} classes, labels "
            f"0..{int(count) - 1}; correct the labels or the number of classes"
        )
    if found := _INDEX.search(str(error)):
        index, count = found.groups()
        return UserError(
            f"{where}: id {index} is out of range: its embedding table has {count} rows, ids 0..{int(count) - 1}; "
            "correct the ids in the features, or the table's size"
        )
    return None


@contextlib.contextmanager
def readable_input(split: str, where: str) -> Iterator[None]:
    """Context manager: raises an error of an input pipeline as a UserError of one line.

    Args:
      split: 'train' or 'eval'.
      where: what was read, for the message.
    """
    try:
        yield
    except tf.errors.OpError as error:
        raise input_error(error, split, where) from error


def input_error(error: tf.errors.OpError, split: str, where: str) -> UserError:
    """The UserError for an error of an input pipeline; arguments as for `readable_input`."""
    return user_error_in(error) or UserError(
        f"the {split!r} data failed at {where}: {reason_of(error)}{_line_of(error)}; correct the data or the "
        "pipeline that reads them, then start the same command again"
    )


def reason_of(error: Exception) -> str:
    """The sentence with the reason in an error of Keras or TensorFlow."""
    text = without_operations(re.sub(r"\x1b\[[0-9;]*m", "", str(error)))
    text = _OF_GRAPH.sub("", text)
    text = re.sub(r"Error in user-defined function passed to (\w+):\d+ .*?: (?=[^:])", r"\1: ", text)
    text = re.sub(r".*assertion failed: \[([^\]]+)\].*", r"\1", text)
    # If Keras fails to compute a layer's outputs symbolically, the error begins with what the layer might lack.
    text = text.partition("Error encountered:\n")[2] or text
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Exception encountered", "Arguments rec"))]
    return (telling or [type(error).__name__])[0][:_LONGEST].rstrip(".: ")


def _line_of(error: tf.errors.OpError) -> str:
    """The line of the user's code that raised the error, ' (FILE, line 3)'; '' if TensorFlow raised it."""
    return _last_of_users(re.findall(r'File "([^"]+)", line (\d+), in ', str(error)))


def is_users_file(path: str) -> bool:
    """Whether the file is the user's code: neither a library's nor this project's."""
    return not path.startswith((*_LIBRARIES, *_OWN))


def users_line_of(error: Exception) -> str:
    """The innermost line of the user's code in the traceback, ' (FILE, line 3)'; '' if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return _last_of_users([(frame.filename, frame.lineno) for frame in frames])


def _is_ours(error: Exception) -> bool:
    """Whether this project's code caused the error, not the user's nor a library that the user's code called."""
    paths = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [path for path in paths if not path.startswith(_LIBRARIES)][-1].startswith(_OWN)


def _last_of_users(lines: Sequence[tuple[str, object]]) -> str:
    own = [(path, line) for path, line in lines if is_users_file(path)]
    return " ({}, line {})".format(*own[-1]) if own else ""
