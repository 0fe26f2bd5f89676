"""A user's own Keras model, built or copied, and checked before it is trained."""

from collections.abc import Callable

import keras

from towers.errors import UserError
from towers.layers.computed_constants import compute_constants


def build(given: keras.Model | Callable[[], keras.Model]) -> keras.Model:
    """A new model from a function, or a copy of a built model with its weights.

    Raises:
      UserError: the function returns no built model, the model can't be copied, or it has a training step of its
        own.
    """
    model = _copy(given) if isinstance(given, keras.Model) else given()
    if not isinstance(model, keras.Model) or not model.built:
        raise UserError(
            f"model returns {type(model).__name__}: "
            "must return a built keras.Model; call model.build(input_shape) before returning it"
        )
    if not model.variables:
        raise UserError(
            f"model {model.name!r} has no variables: build() did not build its layers; "
            "call the model once on a batch before returning it, as model(features[:1])"
        )
    _check_steps(model)
    return model


def _check_steps(model: keras.Model) -> None:
    """Raises UserError for a model with steps of its own, which every mode would ignore without a word."""
    names = ("train_step", "compute_loss", "test_step")
    own = next((name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)), None)
    if own is not None:
        raise UserError(
            f"model {model.name!r}: {type(model).__name__} has a {own}() of its own, which no run calls: "
            "remove it, pass losses to OwnTask, and let layers add others by add_loss"
        )


def _copy(model: keras.Model) -> keras.Model:
    """A copy of the model with the same weights.

    Raises:
      UserError: Keras can't rebuild the model from its configuration, or the copy would lose a vocabulary.
    """
    try:
        copy = keras.models.clone_model(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"model {model.name!r} can't be copied ({type(error).__name__}): "
            "pass a function that builds it instead"
        ) from error
    copy.set_weights(model.get_weights())
    for ours, theirs in zip(copy.variables, model.variables, strict=True):
        if ours.trainable != theirs.trainable:  # frozen alone, not with its layer
            ours.trainable = theirs.trainable
    compute_constants(copy)
    for ours, theirs in zip(copy._flatten_layers(), model._flatten_layers(), strict=True):
        if hasattr(theirs, "get_vocabulary") and theirs.get_vocabulary() != ours.get_vocabulary():
            raise UserError(
                f"model {model.name!r} can't be copied: Keras's copy of layer {theirs.name!r} loses the "
                "vocabulary that it was adapted to; pass a function that builds the model, and adapts it, instead"
            )
    return copy
