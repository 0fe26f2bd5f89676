"""Which of a model's convolutions may run on a kernel of ours inside a CPU tower."""

import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

# (images [N, H, W, C], kernel [height, width, C, K], stride) to their convolution with padding SAME, or None for
# inputs that it doesn't take.
Convolution = Callable[[tf.Tensor, tf.Tensor, int], tf.Tensor | None]
# (inputs, the kernel's shape, the gradient of the outputs, stride) to the gradient of the kernel.
KernelGradient = Callable[[tf.Tensor, tf.TensorShape, tf.Tensor, int], tf.Tensor]


def replaced_convolutions(
    model: keras.Model, kernels: Sequence[Convolution]
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each plain convolution of the model.

    Args:
      model: any model.
      kernels: the first that takes a layer's inputs computes its convolution; if none does, Keras computes it.
    """
    return [
        (layer, "convolution_op", functools.partial(_convolution, layer, kernels))
        for layer in plain_convolutions(model)
    ]


def plain_convolutions(model: keras.Model) -> Iterator[keras.layers.Conv2D]:
    """Keras's own Conv2D layers with edges of zeros and an odd kernel, as long as the stride or longer."""
    return (layer for layer in model._flatten_layers() if _is_plain(layer))


def with_kernel_gradient(of_kernel: KernelGradient, inputs, kernel, stride: int) -> tf.Tensor:
    """TensorFlow's convolution with `of_kernel` for the kernel's gradient; second gradients are TensorFlow's."""
    kernel = tf.convert_to_tensor(kernel, inputs.dtype)
    scope = gradient_scope()
    geometry = {"strides": [1, stride, stride, 1], "padding": "SAME"}

    def of_inputs(kernel, upstream):
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(inputs), filter=kernel, out_backprop=upstream, **geometry
        )

    @tf.custom_gradient
    def kernel_gradient(inputs, upstream):
        def gradients(further):
            return of_inputs(further, upstream), tf.nn.conv2d(inputs, further, **geometry)

        return of_kernel(inputs, kernel.shape, upstream, stride), gradients

    @tf.custom_gradient
    def convolution(inputs, kernel):
        def gradients(upstream):
            with tf.name_scope(scope):
                return of_inputs(kernel, upstream), kernel_gradient(inputs, upstream)

        return tf.nn.conv2d(inputs, kernel, **geometry), gradients

    return convolution(inputs, kernel)


def gradient_scope() -> str:
    """The name scope for the gradient of what is computed now, as TensorFlow names its own: by the layer.

    The operations of a custom gradient would not have the layer's name, by which timelines tell layers apart.
    """
    layer = tf.get_current_name_scope()
    return f"gradient_tape/{layer}/" if layer else "gradient_tape/"


def after(first: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """The tensors, but not before `first` is computed."""
    with tf.control_dependencies([first]):
        return [tf.identity(tensor) for tensor in tensors]


def _is_plain(layer) -> bool:
    return (
        type(layer) is keras.layers.Conv2D
        and layer.padding == "same"
        and layer.data_format == "channels_last"
        and layer.groups == 1
        and set(layer.dilation_rate) == {1}
        and len(set(layer.strides)) == 1
        and all(size % 2 and size >= layer.strides[0] for size in layer.kernel_size)
        and max(layer.kernel_size) > 1
    )


def _convolution(layer, kernels, inputs, kernel):
    for of_ours in kernels:
        outputs = of_ours(inputs, kernel, layer.strides[0])
        if outputs is not None:
            return outputs
    return type(layer).convolution_op(layer, inputs, kernel)
