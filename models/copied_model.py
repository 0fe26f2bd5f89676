"""Copies a user's built Keras model, and checks that the copy computes the same."""

import inspect
from typing import Any

import keras

from towers.errors import UserError
from towers.layers.computed_constants import compute_constants

_PLAIN = (bool, int, float, str, type(None))
# Attributes that may differ: towers draw from their own seeds.
_INDIFFERENT = ("name", "seed")


def copied(model: keras.Model) -> keras.Model:
    """A copy of a built model: the same layers, weights, trainability, regularizers and constraints.

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
    # Only weights: of other variables, the seed of a Dropout whose rate was later set to 0 is not in the copy.
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        _train_alike(ours, theirs)
    compute_constants(copy)
    for ours, theirs in layers:
        _check_layer(model, ours, theirs)
    return copy


def _train_alike(ours: keras.Variable, theirs: keras.Variable) -> None:
    """Copies the settings that were made for their variable itself, not for its layer."""
    if ours.trainable != theirs.trainable:
        ours.trainable = theirs.trainable
    ours.regularizer, ours.constraint = theirs.regularizer, theirs.constraint


def _check_layer(model: keras.Model, ours: keras.layers.Layer, theirs: keras.layers.Layer) -> None:
    """Raises UserError if our copy of a layer lost its vocabulary, an attribute or a constructor's argument."""
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
    """The attribute or constructor's argument whose value differs in our copy; None if all are equal."""
    found, expected = _plain_attributes(ours), _plain_attributes(theirs)
    differing = [name for name, value in expected.items() if name in found and found[name] != value]
    # Attributes that calls change, such as a counter, and names that Keras numbers are no settings: they differ in
    # a copy that was never called too.
    settings = _plain_attributes(_uncalled(ours)) if differing else {}
    lost = next((name for name in differing if settings.get(name) == found[name]), None)
    return lost or _forgotten_argument(ours, theirs)


def _plain_attributes(layer: keras.layers.Layer | None) -> dict[str, list]:
    """The leaves of each public attribute that is a plain value or a structure of such; {} for None."""
    # Attributes that `compile` sets have no effect here.
    of_compile = vars(keras.Sequential()) if isinstance(layer, keras.Model) else ()
    found = {
        name: _plain_leaves(value)
        for name, value in ({} if layer is None else vars(layer)).items()
        if not name.startswith("_") and name not in (*_INDIFFERENT, *of_compile)
    }
    return {name: leaves for name, leaves in found.items() if leaves is not None}


def _plain_leaves(value: Any) -> list | None:
    """(path, leaf) of each leaf; the same for lists and tuples. None if a leaf is not a plain value."""
    try:
        leaves = keras.tree.flatten_with_path(value)
    except TypeError:  # keys without an order
        return None
    if not all(isinstance(leaf, _PLAIN) for _, leaf in leaves):
        return None
    # NaN is not equal to itself.
    return [(path, leaf if leaf == leaf else "nan") for path, leaf in leaves]


def _uncalled(layer: keras.layers.Layer) -> keras.layers.Layer | None:
    """A new layer of the same configuration; None if the layer has none, as may be inside of another layer."""
    try:
        return type(layer).from_config(layer.get_config())
    except (NotImplementedError, TypeError, ValueError):
        return None


def _forgotten_argument(ours: keras.layers.Layer, theirs: keras.layers.Layer) -> str | None:
    """The argument that Keras constructed our layer without, because the layer's configuration lacks it."""
    if type(theirs).__init__.__module__.startswith("keras."):
        return None  # Keras's own layers may name an argument otherwise in the configuration.
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
