"""A user's own Keras model, built or copied, and checked before it is trained."""

from collections.abc import Callable

import keras

from models.copied_model import copied
from towers.errors import UserError


def build(given: keras.Model | Callable[[], keras.Model]) -> keras.Model:
    """A new model from a function, or a copy of a built model with its weights.

    Raises:
      UserError: the function returns no built model, or the model can't be copied, has a training step of its own,
        or has weights that Keras overwrites with their gradients.
    """
    model = given if isinstance(given, keras.Model) else given()
    if not isinstance(model, keras.Model) or not model.built:
        raise UserError(
            f"model returns {type(model).__name__}: "
            "must return a built keras.Model; call model.build(input_shape) before returning it"
        )
    _check_steps(model)
    if model is given:
        model = copied(model)
    if not model.variables:
        raise UserError(
            f"model {model.name!r} has no variables: build() did not build its layers; "
            "call the model once on a batch before returning it, as model(features[:1])"
        )
    _check_weights(model)
    return model


def _check_steps(model: keras.Model) -> None:
    """Raises UserError for a model with steps of its own, which every mode would silently ignore."""
    names = ("train_step", "compute_loss", "test_step", "make_train_function", "make_test_function")
    own = next((name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)), None)
    if own is not None:
        raise UserError(
            f"model {model.name!r}: {type(model).__name__} has a {own}() of its own, which no run calls: "
            "remove it, pass losses to OwnTask, and let layers add others by add_loss"
        )


def _check_weights(model: keras.Model) -> None:
    """Raises UserError for weights that Keras overwrites with their gradients: an update rule would not."""
    overwritten = next((one for one in model.variables if one.overwrite_with_gradient), None)
    if overwritten is not None:
        raise UserError(
            f"model {model.name!r}: weight {overwritten.path} is overwritten by its gradient in Keras, as after "
            "quantize('float8'), which no mode does; don't quantize, and train with precision='bfloat16' instead"
        )
