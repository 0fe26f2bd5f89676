"""What a network weighs and costs, from its layers' shapes alone: no device is used."""

import math
from collections.abc import Iterator

import keras
from keras import layers

from towers.errors import UserError

COUNTED_LAYERS = (layers.Conv2D, layers.DepthwiseConv2D, layers.Dense)


def count_parameters(model: keras.Model) -> int:
    """Gives the number of trainable numbers in `model`."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


def count_multiply_adds(model: keras.Model) -> int:
    """Gives the multiply-adds of one example's forward pass in Conv2D, DepthwiseConv2D and Dense layers.

    Each number of a kernel is used once at each output position, so a layer costs
    kernel size * output positions (padding counts as data, as the kernels compute it). Biases, norms,
    pools, activations and `keras.ops` are left out, as papers do.

    Raises:
      UserError: an output's height or width is not fixed.
      AttributeError: a layer is called more than once (from Keras: it has no single output).
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
            f"layer {layer.name!r} gives {shape}: counting needs a fixed height and width; "
            "build the network with an image_shape without None"
        )
    return math.prod(layer.kernel.shape) * math.prod(positions)
