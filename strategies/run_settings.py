"""The settings that determine what a run computes, as plain values by name.

A checkpoint stores them, so that a later run can report changes. The processes of a run compare them at the start.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task

# Number of evenly spaced rows of an array that its checksum covers.
_CHECKED_ROWS = 10_000
_CHECKED_BYTES = 1 << 24
# A longer list is described as an array.
_LONGEST_LIST = 16
# Name components of settings that may differ between the processes of a run.
_OF_ONE_PROCESS = {"num_input_threads", "paths"}
_SHOWN_CHARACTERS = 80
# The text after the number of elements in the value of a list.
_LIST = " values"

Plain = bool | int | float | str | None


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Plain]:
    """Settings as JSON values by dotted name: {'optimizer': 'Momentum', 'optimizer.momentum': 0.9, ...}.

    Args:
      settings: values, dataclasses, mappings and sequences of them, arrays, Keras objects and functions. An array
        is described by its shape and a checksum, a function and any other object by its name.
    """
    found: dict[str, Plain] = {}
    for name, value in settings.items():
        _describe(name, value, found)
    return found


def common_settings(
    task: Task,
    options: StepOptions,
    *,
    evaluates: bool,
    shapes: Mapping[str, Sequence[int]] | None = None,
    **of_mode: Any,
) -> dict[str, Plain]:
    """The settings that must be the same in all processes that train together, as `plain_settings`.

    Args:
      task, options: what is trained and how.
      evaluates: whether all these processes evaluate.
      shapes: shapes of the model's parameters by name; None if this process has no model.
      **of_mode: further settings, which the mode adds.
    """
    first = {
        "task": type(task).__name__,
        "batch_size": task.batch_size,
        "num_examples": task.num_examples("train"),
    }
    others = {
        **step_settings(options),
        **of_mode,
        "parameters": {name: str(tuple(shape)) for name, shape in (shapes or {}).items()},
    }
    of_task = {name: value for name, value in fields_of(task).items() if name not in first | others}
    if not evaluates:
        of_task = {name: value for name, value in of_task.items() if not name.startswith("eval_")}
    # The error names the first difference, so causes come before their consequences.
    plain = plain_settings(first | of_task | others)
    return {name: value for name, value in plain.items() if not _OF_ONE_PROCESS & set(name.split("."))}


def step_settings(options: StepOptions) -> dict[str, Any]:
    """How a step computes, by the names of flags and arguments."""
    found = fields_of(options)
    return {"optimizer": found.pop("rule"), "learning_rate": found.pop("schedule"), **found}


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass; empty for anything else."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: getattr(value, field.name) for field in fields}


# Advice for settings that differ and are not arguments. A process that lacks one of them may differ.
_ADVICE = {
    "first_batches": "all must read the same data; if they are shuffled, use shuffle(..., seed=1)",
    "precision": "precision='auto' chooses by each process's devices; name one precision for all processes",
    "num_workers": "all must have the same workers in TF_CONFIG",
    "first_features": "all must read the same data; if they are augmented with a seed, use one seed",
}


def check_same(found: Mapping[str, Mapping[str, Plain]]) -> None:
    """Raises UserError, with its name, if a process has another value of a setting than the first process.

    Args:
      found: the settings of each process, by the process's name.
    """
    (first, wanted), *others = found.items()
    for name, settings in others:
        for what in dict.fromkeys([*wanted, *settings]):
            is_unknown = what in _ADVICE and not (what in settings and what in wanted)
            if settings.get(what) != wanted.get(what) and not is_unknown:
                advice = _ADVICE.get(what, "start all processes with the same settings")
                raise UserError(
                    f"{name} was started with {what}={_shown(settings, what)}, and {first} with "
                    f"{what}={_shown(wanted, what)}: {advice}"
                )


def _shown(settings: Mapping[str, Plain], what: str) -> str:
    """A setting's value; for a list its elements."""
    text = str(settings.get(what))
    if text.endswith(_LIST):
        text = ",".join(str(value) for name, value in settings.items() if name.startswith(f"{what}.")) or text
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def changes(before: Mapping[str, Plain], now: Mapping[str, Plain]) -> list[str]:
    """The settings in both that differ, such as 'batch_size was 32, is 64'."""
    both = [name for name in now if name in before and before[name] != now[name]]
    return [f"{name} was {before[name]}, is {now[name]}" for name in both]


def _describe(name: str, value: Any, found: dict[str, Plain]) -> None:
    if isinstance(value, np.generic):
        value = value.item()
    if name.endswith("_seconds"):
        return  # a deadline does not affect numbers
    if value is None or isinstance(value, bool | int | float | str):
        # A number that JSON can't hold is compared by its text.
        found[name] = value if not isinstance(value, float) or np.isfinite(value) else str(value)
    elif isinstance(value, Mapping):
        found[name] = f"{len(value)}{_LIST}"
        for key, child in value.items():
            _describe(f"{name}.{key}", child, found)
    elif isinstance(value, list | tuple) and len(value) <= _LONGEST_LIST:
        found[name] = f"{len(value)}{_LIST}"
        for index, child in enumerate(value):
            _describe(f"{name}.{index}", child, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _describe_fields(name, value, found)
    else:
        found[name] = _name_of(value)


def _describe_fields(name: str, value: Any, found: dict[str, Plain]) -> None:
    """Describes the class's name and its fields; a class with a single field only by this field."""
    fields = dataclasses.fields(value)
    if len(fields) == 1:
        _describe(name, getattr(value, fields[0].name), found)
        return
    found[name] = type(value).__name__
    for field in fields:
        _describe(f"{name}.{field.name}", getattr(value, field.name), found)


def _name_of(value: Any) -> str:
    if isinstance(value, tf.data.Dataset):
        return f"a dataset of {int(value.cardinality())} batches of {value.element_spec}"
    if hasattr(value, "shape") or isinstance(value, list | tuple):
        return _described_array(value)
    if hasattr(value, "get_config") and not isinstance(value, keras.Model | type):
        # Keras's own losses keep their arguments outside of their configuration.
        config = {**value.get_config(), **getattr(value, "_fn_kwargs", {})}
        return f"{type(value).__name__}({config})"
    # Without the address that the text of an object may contain.
    named = getattr(value, "__qualname__", None) or type(value).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", named)


def _described_array(value: Any) -> str:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    described = f"{array.dtype} {list(array.shape)}"
    if array.dtype.hasobject and not all(isinstance(one, str | bytes) for one in array.flat):
        return described
    if array.ndim:
        row_bytes = max(1, array.nbytes // max(1, len(array)))
        rows = max(1, min(_CHECKED_ROWS, _CHECKED_BYTES // row_bytes))
        array = array[:: max(1, -(-len(array) // rows))]
    # An array of Python objects holds addresses, not the texts.
    content = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
    return f"{described} with checksum {zlib.crc32(content):08x}"
