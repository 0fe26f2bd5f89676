"""Constants that a layer computes from its weights when it is built, as `Normalization` does."""

import keras


def compute_constants(model: keras.Model) -> None:
    """Recomputes these constants after the model's weights were set.

    Keras computes them when it loads or adapts a layer, not in `set_weights` or `assign`.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()
