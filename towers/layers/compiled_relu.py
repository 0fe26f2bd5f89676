"""ReLU on one thread of a CPU in compiled loops: in bfloat16 and float16, and joined with compiled batch norms.

    forward    outputs = max(0, a + b)                        of a sum, as after a residual; or max(0, a)
    backward   gradient of inputs = a + b, or 0 where outputs are 0; of a sum, where two layers use the outputs

TensorFlow adds with a kernel of its own, which writes memory that the ReLU reads again, and its kernels for
bfloat16 take longer than memory does. TensorFlow's graph optimizer joins a ReLU with the batch norm before it, and
that stays. In all precisions a ReLU is part of the loops of a compiled batch norm before it, which also add the
other term of a sum (`batch_norm/loops.py`).

CPU ms for 2.1 million numbers, by TensorFlow and compiled (Intel Xeon with AMX, one thread; compiled for AVX2):

                     max(0, a + b)         max(0, a)             gradient              gradient of a sum
    bfloat16         1.77   0.54 (0.68)    1.02   0.43 (0.54)    1.04   0.52 (0.66)    1.75   0.71 (0.81)
    float16          1.04   0.53 (0.60)    0.43   0.35 (0.37)    0.64   0.54 (0.51)    1.27   0.69 (0.67)
    float32          1.20   0.99           0.63   0.63           0.93   0.98           1.52   1.29

Since those measurements a ReLU without a sum selects by bits, and in bfloat16 sums are loops over pairs
(`bfloat16_pairs.py`), with the same results: 0.28, 0.16, 0.21 and 0.34 ms, before 0.42, 0.30, 0.39 and 0.49 (AMD
EPYC, Zen 5, in the cache). In a step of ResNet-20, whose tensors come from memory, they take 16.4 instead of 18.3
of 242 ms.

A step of ResNet-20 in bfloat16 (batch 256, two towers) takes 249 instead of 297 ms of CPU time with AMX, 611
instead of 671 with AVX512-BF16. In float32 steps were as long (four in turn: 0.99 to 1.04), so there the ReLU
stays TensorFlow's. Loops over images with few channels, not over one vector, took up to 16 times as long.

With AVX2 alone it is off: on an AMD EPYC (Zen 3) that step took 1,341 to 1,532 ms with compiled ReLUs and 1,343 to
1,515 without (least of six steps, three rounds in turn, loaded), a single one of 8x8x64 1.08 to 1.18 times as
long.

A call of a compiled loop takes about 10 us: with 16 examples of 1024 elements forward and backward take 1.2 times
TensorFlow's time without a sum, 0.9 with one, with 16 of 4096 0.9 and 0.6. On two threads, which a loop hardly
shares, 64 examples of 4096 take 1.2 and 0.74. XLA compiles once for each number of elements, in 0.05 s.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import record  # the only way to tell tapes other inputs than an operation's

from towers.layers.batch_norm.compiled import Masked, Normalized
from towers.layers.batch_norm.loops import BatchNormLoops
from towers.layers.bfloat16_pairs import paired, rounded, unpaired, widened
from towers.layers.compiled_activations import elementwise_layers, output_shape
from towers.layers.convolutions.replaced import gradient_scope
from towers.layers.made_tensors import made_by, note, source
from towers.precision import SHORT_PRECISIONS

FEWEST_ELEMENTS = 4096
_SUMS = ("AddV2", "AddN")
_BATCH_NORM = "FusedBatchNorm"


def relus_to_compile(model: keras.Model) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each ReLU of the model that has a compiled form."""
    found = _replaced(model, _relu, _activation)
    return [(layer, *others) for layer, *others in found if _takes(output_shape(layer), layer.compute_dtype)]


def relus_to_join(model: keras.Model) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each ReLU of the model, which may join a batch norm's loops."""
    return _replaced(model, _joined_relu, _joined_activation)


def _replaced(model, of_layer, activation) -> list[tuple[keras.layers.Layer, str, Callable]]:
    alone = [
        (layer, "call", functools.partial(of_layer, functools.partial(layers.ReLU.call, layer)))
        for layer in model._flatten_layers()
        if type(layer) is layers.ReLU and _is_plain(layer)
    ]
    ending = [layer for layer in elementwise_layers(model) if layer.activation is keras.activations.relu]
    return alone + [(layer, "activation", activation) for layer in ending]


def _is_plain(layer: layers.ReLU) -> bool:
    return layer.max_value is None and not layer.negative_slope and not layer.threshold


def _takes(shape: Sequence[int | None], dtype: str) -> bool:
    """Whether a ReLU of this shape is compiled. Varying lengths of sequences would need too many loops."""
    if dtype not in SHORT_PRECISIONS or None in shape[1:]:
        return False
    return math.prod(shape[1:]) >= FEWEST_ELEMENTS


def _activation(x: tf.Tensor, *arguments, **options) -> tf.Tensor:
    """A layer's activation; a function, as Keras can't describe a `partial` in a layer's configuration."""
    return _unless_bounded(_relu, x, *arguments, **options)


def _joined_activation(x: tf.Tensor, *arguments, **options) -> tf.Tensor:
    """As `_activation`."""
    return _unless_bounded(_joined_relu, x, *arguments, **options)


def _unless_bounded(relu: Callable, x: tf.Tensor, *arguments, **options) -> tf.Tensor:
    """`relu`, but Keras's function for calls with bounds or a slope, which a custom layer may make."""
    of_keras = keras.activations.relu
    return of_keras(x, *arguments, **options) if arguments or options else relu(of_keras, x)


def _relu(of_keras: Callable, x: tf.Tensor) -> tf.Tensor:
    if x.shape.rank is None or not _takes(x.shape, x.dtype.name):
        return _joined_relu(of_keras, x)
    addends = _addends(x)
    return _compiled_relu(x, addends, _normalized(addends))


def _joined_relu(of_keras: Callable, x: tf.Tensor) -> tf.Tensor:
    """ReLU in a compiled batch norm's loops; by Keras's function if no such batch norm made x or a term of it."""
    if x.shape.rank is None or (normalized := _normalized(addends := _addends(x))) is None:
        return of_keras(x)
    return _compiled_relu(x, addends, normalized)


def _normalized(addends: Sequence[tf.Tensor]) -> tuple[int, Normalized] | None:
    """The index of the first addend that a compiled batch norm made, and what it was made of."""
    made = ((index, _made_by_norm(addend)) for index, addend in enumerate(addends))
    return next((one for one in made if one[1] is not None), None)


def _made_by_norm(x: tf.Tensor) -> Normalized | None:
    """What a compiled batch norm made the tensor of, in the tensor's shape; None if none did."""
    made = made_by(x)
    if not isinstance(made, Normalized) or made.inputs.shape.as_list() != x.shape.as_list():
        return None
    return made


def _compiled_relu(x, addends: Sequence[tf.Tensor], normalized: tuple[int, Normalized] | None) -> tf.Tensor:
    """max(0, x) for x, the sum of the addends, one of which a batch norm may have made."""
    if normalized is not None:
        index, made = normalized
        addends = [*addends[:index], made.inputs, *addends[index + 1 :]]
    scope = gradient_scope()

    def gradient(outputs, upstream):
        with tf.name_scope(scope):
            found = _masked(outputs, upstream)
        # Two sums of the upstream gradient would be computed in two loops.
        if normalized is not None and len(addends) == len(_addends(upstream)) == 1:
            note(found, Masked(upstream, made))
        return found

    # For gradients that TensorFlow derives from operations, as in functions and branches.
    @tf.custom_gradient
    def positive(*addends):
        if normalized is None:
            # TensorFlow's graph optimizer joins a batch norm with the ReLU that follows.
            is_joined = len(addends) == 1 and source(x).startswith(_BATCH_NORM)
            outputs = tf.nn.relu(*addends) if is_joined else _positive_sum(addends)
        else:
            others = [*addends[:index], *addends[index + 1 :]]
            outputs = BatchNormLoops(addends[index]).positive(made.scaling, *others)
        return outputs, lambda upstream: [gradient(outputs, upstream)] * len(addends)

    with record.stop_recording():
        outputs = tf.ensure_shape(positive(*addends), x.shape)
    _record(outputs, x, addends, gradient)
    return outputs


def _record(outputs, x, addends: Sequence[tf.Tensor], gradient: Callable) -> None:
    """Tells tapes that the outputs are the ReLU of x; a tape may know x without knowing the addends.

    A tape that knows the addends of a sum uses these: the addition's own gradient needs the shape of the sum,
    which is not computed. Of two records a tape keeps the last one.
    """
    for sources in [[x], addends] if len(addends) > 1 else [[x]]:
        backward = functools.partial(_same_for_each, len(sources), functools.partial(gradient, outputs))
        record.record_operation("Relu", [outputs], sources, backward)


def _same_for_each(count: int, gradient: Callable, upstream: tf.Tensor) -> list[tf.Tensor]:
    return [gradient(upstream)] * count


def _masked(outputs: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    """The upstream gradient where the outputs are positive."""
    if outputs.dtype.name in SHORT_PRECISIONS:
        return _where_positive(outputs, _addends(upstream))
    return tf.raw_ops.ReluGrad(gradients=upstream, features=outputs)


def _where_positive(outputs: tf.Tensor, addends: Sequence[tf.Tensor]) -> tf.Tensor:
    """The addends' sum where the outputs are positive, with a gradient, which operations on bits lack."""

    @tf.custom_gradient
    def chosen(*addends):
        def gradient(upstream):
            return [_where_positive(outputs, _addends(upstream))] * len(addends)

        return _sum_where_positive(outputs, addends), gradient

    return chosen(*addends)


def _addends(x: tf.Tensor) -> Sequence[tf.Tensor]:
    """The two tensors whose sum x is, or x alone. In a graph, a sum that nothing else needs is not computed."""
    operation = getattr(x, "op", None)
    if operation is None or operation.type not in _SUMS or len(operation.inputs) != 2:
        return [x]
    addends = list(operation.inputs)
    if any(one.shape.rank is None or one.shape.as_list() != x.shape.as_list() for one in addends):
        return [x]
    if operation.type == "AddN" or x.shape.is_fully_defined():
        return addends
    # An addend may have a single example, which is added to all; otherwise nothing is copied.
    shape = tf.broadcast_dynamic_shape(*map(_shape, addends))
    return [_broadcast(one, shape) for one in addends]


def _shape(x: tf.Tensor) -> tf.Tensor:
    """The shape of x; of a batch norm's outputs, which may not be needed, that of its inputs."""
    made = _made_by_norm(x)
    return tf.shape(x if made is None else made.inputs)


def _broadcast(x: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """x broadcast to a shape. If a batch norm made x, the result counts as made of its broadcast inputs."""
    found, made = tf.broadcast_to(x, shape), _made_by_norm(x)
    if made is not None:
        note(found, made._replace(inputs=tf.broadcast_to(made.inputs, shape)))
    return found


def _positive_sum(addends: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(addends) == 1:
        return _over_numbers(_positive, *addends)
    of_pairs = _are_pairs(addends[0])
    return _over_pairs(_positive_pairs, *addends) if of_pairs else _over_numbers(_positive_floats, *addends)


def _sum_where_positive(outputs: tf.Tensor, addends: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(addends) == 1:
        return _over_numbers(_number_where_positive, outputs, *addends)
    if _are_pairs(outputs):
        return _over_pairs(_pairs_where_positive, outputs, *addends)
    return _over_numbers(_floats_where_positive, outputs, *addends)


def _are_pairs(x: tf.Tensor) -> bool:
    return x.dtype == tf.bfloat16 and math.prod(x.shape[1:]) % 2 == 0


def _over_numbers(loop: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    """The loop over tensors of the same shape."""
    found = loop(*(tf.reshape(tensor, [-1]) for tensor in tensors))
    return tf.reshape(found, tf.shape(tensors[0]))


def _over_pairs(loop: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    """The loop over words of tensors of the same shape."""
    return tf.reshape(unpaired(loop(*map(paired, tensors))), tf.shape(tensors[0]))


_compiled = functools.partial(tf.function, jit_compile=True, autograph=False)


@_compiled
def _positive(x):
    """max(0, x) by bits as integers: positive numbers and NaN are above those of -inf, all others not."""
    bits = tf.bitcast(x, tf.int16)
    return tf.bitcast(tf.where(bits > _bits(-math.inf, x), bits, tf.zeros_like(bits)), x.dtype)


@_compiled
def _number_where_positive(outputs, x):
    of_outputs, bits = tf.bitcast(outputs, tf.int16), tf.bitcast(x, tf.int16)
    is_positive = (of_outputs > 0) & (of_outputs <= _bits(math.inf, x))
    return tf.bitcast(tf.where(is_positive, bits, tf.zeros_like(bits)), x.dtype)


def _bits(number: float, like: tf.Tensor) -> np.int16:
    return np.array(number, like.dtype.as_numpy_dtype).view(np.int16)[()]


@_compiled
def _positive_pairs(*addends):
    return rounded(*(tf.nn.relu(_sum(numbers)) for numbers in _of_halves(addends)))


@_compiled
def _pairs_where_positive(outputs, *addends):
    halves = zip(widened(outputs), _of_halves(addends), strict=True)
    return rounded(*(_where(numbers > 0, _sum(others)) for numbers, others in halves))


def _of_halves(words: Sequence[tf.Tensor]) -> Iterator[tuple[tf.Tensor, ...]]:
    """The first numbers of all words, then the second ones."""
    return zip(*map(widened, words), strict=True)


@_compiled
def _positive_floats(*addends):
    return tf.cast(tf.nn.relu(_sum(map(_wide, addends))), addends[0].dtype)


@_compiled
def _floats_where_positive(outputs, *addends):
    return tf.cast(_where(_wide(outputs) > 0, _sum(map(_wide, addends))), outputs.dtype)


def _sum(numbers: Iterable[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(operator.add, numbers)


def _where(condition, x):
    return tf.where(condition, x, tf.zeros_like(x))


def _wide(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32)
