"""Copies of a user's built Keras model, which compute what it computes."""

import inspect
from typing import Any

import keras

from towers.errors import UserError
from towers.layers.computed_constants import compute_constants

_PLAIN = (bool, int, float, str, type(None))
# Differ without effect: towers draw from seeds of their own.
_INDIFFERENT = ("name", "seed")


def copied(model: keras.Model) -> keras.Model:
    """A copy of a built model: the same layers, with its weights and what they are trained by.

    Raises:
      UserError: Keras can't rebuild the model from its configuration, or the copy would compute something else.
    """
    try:
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
        layers = list(zip(copy._flatten_layers(), model._flatten_layers(), strict=True))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"model {model.name!r} can't be copied ({type(error).__name__}): "
            "pass a function that builds it instead"
        ) from error
    if type(copy).call is not type(model).call:
        raise UserError(
            f"model {model.name!r} can't be copied: Keras's copy is a {type(copy).__name__} without the call() of "
            f"{type(model).__name__}; pass a function that builds the model instead"
        )
    # Not all variables: a Dropout whose rate was set to 0 later has a seed, and its copy has none.
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        _train_alike(ours, theirs)
    compute_constants(copy)
    for ours, theirs in layers:
        _check_layer(model, ours, theirs)
    return copy


def _train_alike(ours: keras.Variable, theirs: keras.Variable) -> None:
    """Gives our variable what was set for theirs alone, not for its layer."""
    if ours.trainable != theirs.trainable:
        ours.trainable = theirs.trainable
    ours.regularizer, ours.constraint = theirs.regularizer, theirs.constraint


def _check_layer(model: keras.Model, ours: keras.layers.Layer, theirs: keras.layers.Layer) -> None:
    """Raises UserError if our copy of a layer lacks what the layer was adapted to or constructed with."""
    if hasattr(theirs, "get_vocabulary") and theirs.get_vocabulary() != ours.get_vocabulary():
        raise UserError(
            f"model {model.name!r} can't be copied: Keras's copy of layer {theirs.name!r} loses the "
            "vocabulary that it was adapted to; pass a function that builds the model, and adapts it, instead"
        )
    lost = _lost_setting(ours, theirs)
    if lost is not None:
        raise UserError(
            f"model {model.name!r} can't be copied: Keras's copy of layer {theirs.name!r} loses its {lost}; "
            f"return {lost} from the layer's get_config(), or pass a function that builds the model instead"
        )


def _lost_setting(ours: keras.layers.Layer, theirs: keras.layers.Layer) -> str | None:
    """The attribute or argument of the constructor that our copy has another value of; None if all agree."""
    found, expected = _plain_attributes(ours), _plain_attributes(theirs)
    differing = [name for name, value in expected.items() if name in found and found[name] != value]
    # What calls change, such as a count of them, and names that Keras numbers are no settings: they differ in an
    # uncalled copy too.
    settings = _plain_attributes(_uncalled(ours)) if differing else {}
    lost = next((name for name in differing if settings.get(name) == found[name]), None)
    return lost or _forgotten_argument(ours, theirs)


def _plain_attributes(layer: keras.layers.Layer | None) -> dict[str, list]:
    """The leaves of each public attribute that is a plain value or a structure of them; none of None."""
    # What `compile` sets trains nothing here.
    of_compile = vars(keras.Sequential()) if isinstance(layer, keras.Model) else ()
    found = {
        name: _plain_leaves(value)
        for name, value in ({} if layer is None else vars(layer)).items()
        if not name.startswith("_") and name not in (*_INDIFFERENT, *of_compile)
    }
    return {name: leaves for name, leaves in found.items() if leaves is not None}


def _plain_leaves(value: Any) -> list | None:
    """Each leaf of a structure and its path, of a list as of a tuple; None if one is no plain value."""
    try:
        leaves = keras.tree.flatten_with_path(value)
    except TypeError:  # keys without an order
        return None
    if not all(isinstance(leaf, _PLAIN) for _, leaf in leaves):
        return None
    # NaN is unlike itself.
    return [(path, leaf if leaf == leaf else "nan") for path, leaf in leaves]


def _uncalled(layer: keras.layers.Layer) -> keras.layers.Layer | None:
    """A layer of the same configuration; None if it has none, as only a layer within another one may."""
    try:
        return type(layer).from_config(layer.get_config())
    except (NotImplementedError, TypeError, ValueError):
        return None


def _forgotten_argument(ours: keras.layers.Layer, theirs: keras.layers.Layer) -> str | None:
    """The argument that Keras constructed our layer without, because the layer's configuration lacks it."""
    if type(theirs).__init__.__module__.startswith("keras."):
        return None  # Keras's own, which may give it to the configuration by another name.
    received, given = (getattr(layer, "_auto_config", None) for layer in (ours, theirs))
    if received is None or given is None:
        return None  # Keras records arguments, with defaults, if all are plain.
    constructor = inspect.signature(type(theirs).__init__).parameters
    differing = [
        name
        for name, value in given.config.items()
        if name in constructor
        and name not in _INDIFFERENT
        and _plain_leaves(received.config.get(name)) != _plain_leaves(value)
    ]
    config = theirs.get_config() if differing else {}
    return next((name for name in differing if name not in config), None)
