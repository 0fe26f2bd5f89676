"""A network's numbers of parameters and multiply-adds, from its layers' shapes, without running it."""

import math
from collections.abc import Iterator

import keras
from keras import layers

from towers.errors import UserError

COUNTED_LAYERS = (layers.Conv2D, layers.DepthwiseConv2D, layers.Dense)


def count_parameters(model: keras.Model) -> int:
    """Number of trainable parameters in `model`."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


def count_multiply_adds(model: keras.Model) -> int:
    """Multiply-adds of one example's forward pass in the Conv2D, DepthwiseConv2D and Dense layers.

    A layer's multiply-adds = numbers in its kernel * output positions. Positions where the kernel covers padding
    count too, because they are computed. As in papers, biases, norms, pools, activations and `keras.ops` do not
    count.

    Raises:
      UserError: an output's height or width is not fixed.
      AttributeError: a layer is called more than once (raised by Keras: the layer has no single output).
    """
    return sum(_kernel_uses(layer) for layer in _counted_layers(model))


def _counted_layers(model: keras.Model) -> Iterator[keras.Layer]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _counted_layers(layer)
        elif isinstance(layer, COUNTED_LAYERS):
            yield layer


def _kernel_uses(layer: keras.Layer) -> int:
    shape = layer.output.shape
    channels_first = getattr(layer, "data_format", "channels_last") == "channels_first"
    positions = shape[2:] if channels_first else shape[1:-1]
    if None in positions:
        raise UserError(
            f"layer {layer.name!r} has the output shape {shape}: counting needs a fixed height and width; "
            "build the network with an image_shape without None"
        )
    return math.prod(layer.kernel.shape) * math.prod(positions)
