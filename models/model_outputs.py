"""Orders what the user gives for each output (losses, labels, weights, metrics) like the model's outputs."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from towers.errors import UserError


def flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def output_names_of(model: keras.Model) -> tuple[str, ...]:
    """Keras's names of the model's outputs; () for a subclassed model, whose outputs have no names."""
    if isinstance(model, keras.Sequential):
        return (model.layers[-1].name,)
    return tuple(getattr(model, "output_names", None) or ())


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Like tf.nest.map_structure, but only mappings, lists and tuples are structures."""
    if isinstance(structure, Mapping):
        return {key: map_leaves(function, value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [map_leaves(function, value) for value in structure]
    return function(structure)


def flat_leaves(structure: Any) -> list[Any]:
    """The leaves of nested mappings, lists and tuples."""
    if isinstance(structure, (Mapping, list, tuple)):
        return [leaf for value in flat(structure) for leaf in flat_leaves(value)]
    return [structure]


def _check_flat(outputs: Any) -> None:
    """Raises UserError for nested outputs, which have no names or positions of their own."""
    inner = next((one for one in flat(outputs) if isinstance(one, (Mapping, list, tuple))), None)
    if inner is not None:
        raise UserError(
            f"the model returns a {type(inner).__name__} within its {type(outputs).__name__} of outputs: must "
            "return a tensor, or one dict or list of tensors; return all outputs in one"
        )


def given_by_output(what: str, given: Any, outputs: Any, names: Callable[[], tuple[str, ...]]) -> list[Any]:
    """A list with one entry for each output, in the outputs' order.

    Args:
      what: name of `given` in messages.
      given: a mapping by output name (an output without an entry gets None), a sequence in the outputs' order, or
        one value for all outputs.
      outputs: the model's outputs.
      names: returns the names of the outputs.

    Raises:
      UserError: no output has a given name, a sequence is not as long as the outputs, or outputs are nested.
    """
    _check_flat(outputs)
    num_outputs = len(flat(outputs))
    if isinstance(given, Mapping):
        if not names():
            raise UserError(f"{what} by name: the model's outputs have no names; pass a list in their order")
        unknown = sorted(set(given) - set(names()))
        if unknown:
            raise UserError(
                f"{what} for {unknown[0]!r}: the outputs are {', '.join(names())}; use one of these names"
            )
        return [given.get(name) for name in names()]
    if isinstance(given, (list, tuple)):
        if isinstance(outputs, Mapping):
            raise UserError(
                f"{what} as a list: the outputs are a dict of {', '.join(names())}; pass a dict by name"
            )
        if len(given) != num_outputs:
            raise UserError(f"{len(given)} {what} for {num_outputs} outputs: pass one for each output")
        return list(given)
    if what == "labels" and num_outputs > 1:
        raise UserError(f"one array of labels for {num_outputs} outputs: pass labels by name or in order")
    return [given] * num_outputs
