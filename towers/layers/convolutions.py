"""Which of a model's convolutions may run on a kernel of ours inside a CPU tower."""

import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

# Of [N, H, W, C] and a kernel [height, width, C, K]: their convolution, or None for inputs that it doesn't take.
Convolution = Callable[[tf.Tensor, tf.Tensor], tf.Tensor | None]


def replaced_convolutions(
    model: keras.Model, kernels: Sequence[Convolution]
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each plain convolution of the model.

    Args:
      model: any model.
      kernels: the first that takes a layer's inputs computes them; if none does, Keras.
    """
    return [
        (layer, "convolution_op", functools.partial(_convolution, layer, kernels))
        for layer in plain_convolutions(model)
    ]


def plain_convolutions(model: keras.Model) -> Iterator[keras.layers.Conv2D]:
    """Keras's own Conv2D layers with stride 1, an odd kernel and an output as large as its input."""
    return (layer for layer in model._flatten_layers() if _is_plain(layer))


def gradient_scope() -> str:
    """The name scope for the gradient of what is computed now, as TensorFlow names its own: by the layer.

    A custom gradient's operations have no layer in their names, by which timelines tell layers apart.
    """
    layer = tf.get_current_name_scope()
    return f"gradient_tape/{layer}/" if layer else "gradient_tape/"


def after(first: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """The tensors, once `first` is there."""
    with tf.control_dependencies([first]):
        return [tf.identity(tensor) for tensor in tensors]


def _is_plain(layer) -> bool:
    return (
        type(layer) is keras.layers.Conv2D
        and layer.padding == "same"
        and layer.data_format == "channels_last"
        and layer.groups == 1
        and set(layer.strides) == set(layer.dilation_rate) == {1}
        and all(size % 2 for size in layer.kernel_size)
        and max(layer.kernel_size) > 1
    )


def _convolution(layer, kernels, inputs, kernel):
    for of_ours in kernels:
        outputs = of_ours(inputs, kernel)
        if outputs is not None:
            return outputs
    return type(layer).convolution_op(layer, inputs, kernel)
