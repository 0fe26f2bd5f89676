"""What is given by output - losses, labels, weights, metrics - in the order of a model's outputs."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from towers.errors import UserError


def flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def output_names_of(model: keras.Model) -> tuple[str, ...]:
    """The names that Keras knows outputs by; a subclassed model has none."""
    if isinstance(model, keras.Sequential):
        return (model.layers[-1].name,)
    return tuple(getattr(model, "output_names", None) or ())


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """As tf.nest.map_structure, but it leaves objects that look like structures alone."""
    if isinstance(structure, Mapping):
        return {key: map_leaves(function, value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [map_leaves(function, value) for value in structure]
    return function(structure)


def given_by_output(what: str, given: Any, outputs: Any, names: Callable[[], tuple[str, ...]]) -> list[Any]:
    """`given` in the order of the outputs: by name (left out: None), in order, or one for all.

    Raises:
      UserError: names no output, or not one for each.
    """
    num_outputs = len(flat(outputs))
    if isinstance(given, Mapping):
        if not names():
            raise UserError(f"{what} by name: the model does not name its outputs; give a list in their order")
        unknown = sorted(set(given) - set(names()))
        if unknown:
            raise UserError(
                f"{what} for {unknown[0]!r}: the outputs are {', '.join(names())}; use one of these names"
            )
        return [given.get(name) for name in names()]
    if isinstance(given, (list, tuple)):
        if isinstance(outputs, Mapping):
            raise UserError(f"{what} in order: the outputs have names, {', '.join(names())}; give a dict by name")
        if len(given) != num_outputs:
            raise UserError(f"{len(given)} {what} for {num_outputs} outputs: give one an output")
        return list(given)
    if what == "labels" and num_outputs > 1:
        raise UserError(f"one array of labels for {num_outputs} outputs: give labels by name or in order")
    return [given] * num_outputs
