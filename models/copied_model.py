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
      UserError: Keras can't rebuild the model from its configuration, or a layer of the copy would be another one.
    """
    try:
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"model {model.name!r} can't be copied ({type(error).__name__}): "
            "pass a function that builds it instead"
        ) from error
    for ours, theirs in zip(copy.variables, model.variables, strict=True):
        _train_alike(ours, theirs)
    compute_constants(copy)
    for ours, theirs in zip(copy._flatten_layers(), model._flatten_layers(), strict=True):
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
    """The name of a plain argument or attribute that our copy has another value of; None if all agree."""
    found, expected = _plain_attributes(ours), _plain_attributes(theirs)
    differing = (name for name, value in expected.items() if name in found and found[name] != value)
    return next(differing, None) or _forgotten_argument(theirs)


def _plain_attributes(layer: keras.layers.Layer) -> dict[str, Any]:
    """The public attributes that are plain values or structures of them."""
    # What `compile` sets trains nothing here.
    of_compile = vars(keras.Sequential()) if isinstance(layer, keras.Model) else ()
    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_")
        and name not in (*_INDIFFERENT, *of_compile)
        and all(isinstance(leaf, _PLAIN) for leaf in keras.tree.flatten(value))
    }


def _forgotten_argument(layer: keras.layers.Layer) -> str | None:
    """The constructor's argument that was given, and that the layer's configuration lacks."""
    if type(layer).__init__.__module__.startswith("keras."):
        return None  # Keras's own, which may give it to the configuration by another name.
    given, constructor = layer._auto_config, inspect.signature(type(layer).__init__).parameters
    config = layer.get_config()
    return next(
        (
            name
            for name, value in (given.config if given else {}).items()
            if name in constructor and name not in (*config, *_INDIFFERENT) and value != constructor[name].default
        ),
        None,
    )
