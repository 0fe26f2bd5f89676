"""The last layer of a classifier."""

import keras


def logits_layer(num_classes: int, *, use_bias: bool = True) -> keras.layers.Dense:
    """Dense [N, num_classes] in at least float32: a softmax of half-precision logits loses small probabilities."""
    compute_dtype = keras.config.dtype_policy().compute_dtype
    return keras.layers.Dense(
        num_classes,
        use_bias=use_bias,
        dtype=keras.backend.result_type(compute_dtype, "float32"),
        name="logits",
    )
