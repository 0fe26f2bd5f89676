"""ReLU in bfloat16 or float16 on one thread of a CPU: compiled loops, which also add what the ReLU is of.

    forward    outputs = max(0, a + b)                        of a sum, as after a residual; or max(0, a)
    backward   gradient of inputs = a + b, or 0 where outputs are 0; of a sum, where two layers use the outputs

TensorFlow adds with a kernel of its own, which writes memory that the ReLU reads again, and its kernels for
bfloat16 take longer than memory does. TensorFlow's graph optimizer joins a ReLU with the batch norm before it, and
that stays.

CPU ms for 2.1 million numbers, by TensorFlow and compiled (Intel Xeon with AMX, one thread; compiled for AVX2):

                     max(0, a + b)         max(0, a)             gradient              gradient of a sum
    bfloat16         1.77   0.54 (0.68)    1.02   0.43 (0.54)    1.04   0.52 (0.66)    1.75   0.71 (0.81)
    float16          1.04   0.53 (0.60)    0.43   0.35 (0.37)    0.64   0.54 (0.51)    1.27   0.69 (0.67)
    float32          1.20   0.99           0.63   0.63           0.93   0.98           1.52   1.29

A step of ResNet-20 in bfloat16 (batch 256, two towers) takes 249 instead of 297 ms of CPU time with AMX, 611
instead of 671 with AVX512-BF16. In float32 steps were as long (four in turn: 0.99 to 1.04), so it stays
TensorFlow's. Loops over images with few channels, not over one vector, took up to 16 times as long.

With AVX2 alone it is off: on an AMD EPYC (Zen 3) that step took 1,341 to 1,532 ms with compiled ReLUs and 1,343 to
1,515 without (least of six steps, three rounds in turn, loaded), a single one of 8x8x64 1.08 to 1.18 times as
long.

A call of a compiled loop takes about 10 us: with 16 examples of 1024 elements forward and backward take 1.2 times
TensorFlow's time without a sum, 0.9 with one, with 16 of 4096 0.9 and 0.6. On two threads, which a loop hardly
shares, 64 examples of 4096 take 1.2 and 0.74. XLA compiles once for each number of elements, in 0.05 s.
"""

import functools
import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras import layers

from towers.layers.compiled_activations import elementwise_layers, output_shape
from towers.layers.convolutions import gradient_scope
from towers.precision import SHORT_PRECISIONS

FEWEST_ELEMENTS = 4096
_SUMS = ("AddV2", "AddN")
_BATCH_NORM = "FusedBatchNorm"
# Operations whose outputs are their inputs.
_FORWARDING = ("Identity", "IdentityN", "Reshape")


def relus_to_compile(model: keras.Model) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each ReLU of the model that has a compiled form."""
    alone = [
        (layer, "call", functools.partial(_relu, functools.partial(layers.ReLU.call, layer)))
        for layer in model._flatten_layers()
        if type(layer) is layers.ReLU and _is_plain(layer)
    ]
    activations = [
        (layer, "activation", _activation)
        for layer in elementwise_layers(model)
        if layer.activation is keras.activations.relu
    ]
    return [
        (layer, *others)
        for layer, *others in (*alone, *activations)
        if _takes(output_shape(layer), layer.compute_dtype)
    ]


def _is_plain(layer: layers.ReLU) -> bool:
    return layer.max_value is None and not layer.negative_slope and not layer.threshold


def _takes(shape: Sequence[int | None], dtype: str) -> bool:
    """Lengths that vary beside the batch's, as those of sequences, would compile too many loops."""
    if dtype not in SHORT_PRECISIONS or None in shape[1:]:
        return False
    return math.prod(shape[1:]) >= FEWEST_ELEMENTS


def _activation(x: tf.Tensor) -> tf.Tensor:
    """A function, which Keras can describe in a layer's configuration, unlike a partial one."""
    return _relu(keras.activations.relu, x)


def _relu(of_keras: Callable, x: tf.Tensor) -> tf.Tensor:
    if x.shape.rank is None or not _takes(x.shape, x.dtype.name):
        return of_keras(x)
    scope = gradient_scope()

    @tf.custom_gradient
    def positive(*addends):
        # TensorFlow's graph optimizer joins a batch norm with the ReLU behind it.
        is_joined = len(addends) == 1 and _source(x).startswith(_BATCH_NORM)
        outputs = tf.nn.relu(*addends) if is_joined else _compiled(_positive_sum, *addends)

        def gradient(upstream):
            with tf.name_scope(scope):
                found = _compiled(_sum_where_positive, outputs, *_addends(upstream))
            return [found] * len(addends)

        return outputs, gradient

    return tf.ensure_shape(positive(*_addends(x)), x.shape)


def _addends(x: tf.Tensor) -> Sequence[tf.Tensor]:
    """The two tensors whose sum it is, or itself. In a graph, a sum that nothing else needs is not computed."""
    operation = getattr(x, "op", None)
    if operation is None or operation.type not in _SUMS or len(operation.inputs) != 2:
        return [x]
    addends = list(operation.inputs)
    if any(one.shape.rank is None or one.shape.as_list() != x.shape.as_list() for one in addends):
        return [x]
    if operation.type == "AddN" or x.shape.is_fully_defined():
        return addends
    # One may still have a single example, which the sum adds to all; otherwise nothing is copied.
    shape = tf.broadcast_dynamic_shape(*map(tf.shape, addends))
    return [tf.broadcast_to(one, shape) for one in addends]


def _source(x: tf.Tensor) -> str:
    """The type of the operation that computed it; '' outside of graphs."""
    operation = getattr(x, "op", None)
    while operation is not None and operation.type in _FORWARDING:
        x = operation.inputs[x.value_index]
        operation = x.op
    return "" if operation is None else operation.type


def _compiled(loop: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    """The loop over tensors of the same shape."""
    found = loop(*(tf.reshape(tensor, [-1]) for tensor in tensors))
    return tf.reshape(found, tf.shape(tensors[0]))


@tf.function(jit_compile=True, autograph=False)
def _positive_sum(*addends):
    return tf.cast(tf.nn.relu(_sum(addends)), addends[0].dtype)


@tf.function(jit_compile=True, autograph=False)
def _sum_where_positive(outputs, *addends):
    found = _sum(addends)
    return tf.cast(tf.where(_wide(outputs) > 0, found, tf.zeros_like(found)), addends[0].dtype)


def _sum(addends: Sequence[tf.Tensor]) -> tf.Tensor:
    return sum(map(_wide, addends[1:]), _wide(addends[0]))


def _wide(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32)
