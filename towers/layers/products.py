"""Layers that multiply by a kernel and add a bias, in bfloat16 or float16, inside a CPU tower.

**Products in float32**, for CPUs that multiply 16-bit numbers no faster. The results are the same: oneDNN sums
products in float32 too, and rounds once. Between layers, and until the backward pass, tensors keep their 16 bits.
Convolutions of many channels may then use Winograd's method.

**Exact gradients of biases.** TensorFlow's CPU kernel for them sums bfloat16 numbers in bfloat16, which has 8
bits: a sum of ones ends at 256, however many there are (TensorFlow 2.21; its own kernel for gradients of depthwise
kernels has the same fault, oneDNN's has not). Here the sum is computed in float32 and rounded once.

CPU ms of both passes over 128 examples: by kernels for bfloat16, for float32, and in float32 from bfloat16 (Intel
Xeon, one thread; oneDNN limited to AVX512-BF16, to AVX-512; 32 examples by TensorFlow's own kernels):

                              AVX512-BF16           AVX-512               Eigen
    convolution 32x32x16       13.7   9.1  10.8      34     9   10         106   11   10
    16x16x32                   12.5   7.7   8.5      33     8    9         100    6    5
    8x8x64                     12.7   7.6   7.9      31     7    8         100    6    5
    7x7x256                     148    92    94     385    89   90       1,158   54   54
    [8192, 256] x [256, 1024]    88    59    65     241    56   63

Float16 convolutions over 8x8x64 take 471 ms by oneDNN (with AVX512-FP16), 29 by TensorFlow's own kernels, and 2.2
in float32 (32 examples).
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import layers, ops

from towers.layers.convolutions.replaced import after, gradient_scope
from towers.precision import SHORT_PRECISIONS

Product = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
# The attribute of a layer whose product is computed in float32 while kernels are in place.
_WIDENED = "_towers_widened"


def replaced_calls(
    model: keras.Model, *, float32_products: bool, exact_bias_gradients: bool
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each layer whose call is replaced.

    Args:
      model: any model.
      float32_products, exact_bias_gradients: as for `towers.layers.kernels.LayerKernels`.
    """
    found = layers_with_products(model)
    products = [(layer, _WIDENED, in_float32) for layer in found]
    # A custom call, or one that slices replaced, stays.
    calls = [
        (layer, "call", functools.partial(_call, layer))
        for layer in found
        if "call" not in layer.__dict__ and (float32_products or (exact_bias_gradients and layer.bias is not None))
    ]
    return [*(products if float32_products else []), *calls]


def layers_with_products(model: keras.Model) -> list[keras.layers.Layer]:
    """The model's convolutions and dense layers in bfloat16 or float16, without subclasses and causal ones.

    Attention between its projections, SeparableConv and recurrent cells keep TensorFlow's kernels, too.
    """
    return [layer for layer in model._flatten_layers() if _is_plain(layer)]


def multiplied(layer: keras.layers.Layer, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """The layer's product with `kernel`, its own or a part of it, as the kernels in place compute it."""
    # Looked up now: when the backward pass is traced, the replacements are no longer in place.
    product, widened = _plain_product(layer), layer.__dict__.get(_WIDENED)
    return widened(product, inputs, kernel) if widened else product(inputs, kernel)


def in_float32(product: Product, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """The product of 16-bit numbers, computed in float32 and rounded; for other dtypes simply the product.

    Args:
      product: differentiable, without variables of its own.
      inputs, kernel: its operands.
    """
    # Keras's products take sparse inputs too.
    if not isinstance(inputs, tf.Tensor) or inputs.dtype.name not in SHORT_PRECISIONS:
        return product(inputs, kernel)
    scope = gradient_scope()

    @tf.custom_gradient
    def rounded(inputs, kernel):
        def gradient(upstream):
            with tf.name_scope(scope), tf.GradientTape() as tape:
                # Widened again once the upstream gradient is computed: kept from the forward pass, wide tensors
                # would take twice the memory. No gradient needs the outputs, so nothing computes them.
                again = [_wide(tensor) for tensor in after(upstream, inputs, kernel)]
                tape.watch(again)
                outputs = product(*again)
                found = tape.gradient(outputs, again, _wide(upstream))
            return [tf.cast(one, inputs.dtype) for one in found]

        return tf.cast(product(_wide(inputs), _wide(kernel)), inputs.dtype), gradient

    return rounded(inputs, tf.cast(kernel, inputs.dtype))


def with_bias(outputs: tf.Tensor, bias: tf.Tensor | keras.Variable) -> tf.Tensor:
    """outputs [..., C] + bias, whose gradient is an exact sum."""
    bias = tf.cast(bias, outputs.dtype)
    if outputs.dtype != tf.bfloat16:
        return ops.add(outputs, bias)
    if bias.shape.rank != 1:
        # Keras's own addition would see a vector in [1, C].
        return tf.add(outputs, bias)

    @tf.custom_gradient
    def biased(outputs, bias):
        def gradient(upstream):
            return upstream, tf.reduce_sum(upstream, list(range(upstream.shape.rank - 1)))

        return tf.nn.bias_add(outputs, bias), gradient

    return biased(outputs, bias)


def _call(layer, inputs, training=None):
    outputs = multiplied(layer, inputs, layer.kernel)
    if layer.bias is not None:
        outputs = with_bias(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def _plain_product(layer) -> Product:
    if isinstance(layer, _CONVOLUTIONS):
        return layer.convolution_op
    kind = next(kind for kind in type(layer).__mro__ if kind in _PRODUCTS)
    return functools.partial(_PRODUCTS[kind], layer)


def _transposed(layer, inputs, kernel):
    return ops.conv_transpose(
        inputs, kernel, output_padding=layer.output_padding, strides=list(layer.strides), **_geometry(layer)
    )


def _depthwise(layer, inputs, kernel):
    return ops.depthwise_conv(inputs, kernel, strides=layer.strides, **_geometry(layer))


def _geometry(layer) -> dict:
    return {"padding": layer.padding, "dilation_rate": layer.dilation_rate, "data_format": layer.data_format}


def _matmul(layer, inputs, kernel):
    return ops.matmul(inputs, kernel)


def _einsum(layer, inputs, kernel):
    return ops.einsum(layer.equation, inputs, kernel)


_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_PRODUCTS = {
    **dict.fromkeys((layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose), _transposed),
    **dict.fromkeys((layers.DepthwiseConv1D, layers.DepthwiseConv2D), _depthwise),
    layers.Dense: _matmul,
    layers.EinsumDense: _einsum,
}


def _is_plain(layer) -> bool:
    is_known = type(layer) in (*_CONVOLUTIONS, *_PRODUCTS)
    if not is_known or not layer.built or layer.compute_dtype not in SHORT_PRECISIONS:
        return False
    has_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    return has_last and getattr(layer, "padding", None) != "causal"


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32)
