"""Measures the CPU time of each of our own kernels and of TensorFlow's, alternately, on one thread.

CPU time hardly changes if other programs use the machine too. A kernel that is slower than TensorFlow's belongs
behind a gate: `towers.options.StepOptions.kernels` decides which kernels run on which CPU.

CPU time of ours / theirs, forward and backward, batch 64, medians of five (Intel Xeon with AVX-512 BF16 without
AMX, loaded; oneDNN limited to AVX512_CORE is nearly the same; 0.3 ms of each call are Python's):

                                                    float32            bfloat16           float32, oneDNN with AVX2
    batch norm, six shapes                          0.32 - 0.66        0.25 - 0.57        0.84 - 1.49
    GELU, 12,544 to 16,384 elements of an example   0.25 - 0.30        0.17 - 0.19        0.24 - 0.29
          1,024; 256; 64 elements                   0.67; 0.91; 1.06   0.38; 0.69; 1.00   0.67; 1.02; 1.04
    SiLU, 12,544 to 16,384 elements                 0.37 - 0.42        0.28 - 0.32        0.38 - 0.48
          1,024; 256; 64 elements                   0.90; 1.08; 1.19   0.59; 1.00; 1.04   0.91; 1.16; 1.17

On an AMD EPYC (Zen 5: AVX-512, avx512_bf16; medians of five) in float32 and bfloat16: batch norm 0.28 to 0.67 and
0.16 to 0.57; GELU of 12,544 elements and more 0.3 and 0.16, SiLU 0.5 and 0.26; ReLU in bfloat16 0.45 to 0.75;
Winograd's method 0.59 to 0.83. Examples as channels in bfloat16: 8x8x32 0.89, 8x8x64 0.80, 15x15x64 0.87,
16x16x128 0.92, 7x7x256 0.70, 3x3x256 0.49, 2x2x512 0.42; in float32 3x3x256 0.78, 2x2x512 0.63.

On an Intel Xeon with AMX (medians of seven, three rounds) in float32 and bfloat16: batch norm 0.34 to 0.59 and
0.25 to 0.52; GELU 0.26 to 0.67 and 0.13 to 0.39, SiLU 0.37 to 0.97 and 0.24 to 0.60; ReLU in bfloat16 0.72 to
0.93; Winograd's method 0.49 to 0.89, but 15x15x64 1.04. Examples as channels in bfloat16: 8x8x64 0.76, 7x7x256
0.46, 3x3x256 0.27, 2x2x512 0.37, and off 8x8x32 1.02, 15x15x64 1.16, 16x16x128 1.09; in float32 3x3x256 0.73,
2x2x512 0.64.

A ring's sums of 4 million numbers, CPU ms, ours and TensorFlow's: float32 1.3 and 4.7, bfloat16 5.8 and 7.8,
float16 16 and 7.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

from launch.flags.devices import devices_from_flags
from strategies.ring.exchange.tcp_ring import add_to
from strategies.wire_precisions import WIRE_PRECISIONS
from towers.layers import compiled_relu
from towers.layers.compiled_activations import FEWEST_ELEMENTS
from towers.layers.kernels import LayerKernels
from towers.options import StepOptions

FLAGS = flags.FLAGS
_PLAIN = LayerKernels(fused_batch_norm=False)
# A measurement repeats a short kernel for at least this time.
_SHORTEST_SECONDS = 0.02
# Elements that a ring sums at a time.
_SUMMED = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """A kernel at one shape.

    Attributes:
      kernel: its name, an attribute of `LayerKernels`.
      layer: makes a layer that the kernel computes.
      shape: shape of the layer's input, examples included.
    """

    kernel: str
    layer: Callable[[], keras.layers.Layer]
    shape: tuple[int, ...]


def _activation(name: str) -> Callable[[], keras.layers.Layer]:
    return lambda: layers.Activation(name)


def _convolution(channels: int) -> Callable[[], keras.layers.Layer]:
    return lambda: layers.Conv2D(channels, 3, padding="same", use_bias=False)


# Layers of our networks at 64 examples: ResNet-20, cifar_fast, the transformer.
_LAYERS = (
    *(
        _Measured(kernel=kernel, layer=layers.BatchNormalization, shape=(64, *shape))
        for kernel in ("fused_batch_norm", "compiled_batch_norm")
        for shape in ((32, 32, 16), (16, 16, 32), (8, 8, 64), (15, 15, 64), (7, 7, 256), (3, 3, 256))
    ),
    *(
        _Measured(kernel="compiled_activations", layer=_activation(name), shape=(64, *shape))
        for name in ("gelu", "silu")
        for shape in ((15, 15, 64), (7, 7, 256), (64, 256), (1024,), (256,), (64,), (10,))
    ),
    *(
        _Measured(kernel="compiled_relu", layer=_activation("relu"), shape=(64, *shape))
        for shape in ((32, 32, 16), (16, 16, 32), (8, 8, 64), (4, 4, 64))
    ),
    *(
        _Measured(kernel="examples_as_channels", layer=_convolution(shape[-1]), shape=(64, *shape))
        for shape in (
            *((16, 16, 32), (8, 8, 32), (15, 15, 64), (8, 8, 64)),
            *((16, 16, 128), (7, 7, 256), (3, 3, 256), (2, 2, 512)),
        )
    ),
    *(
        _Measured(kernel="winograd_channels", layer=_convolution(shape[-1]), shape=(64, *shape))
        for shape in ((16, 16, 32), (8, 8, 64), (15, 15, 64), (8, 8, 128), (7, 7, 256), (4, 4, 512))
    ),
    *(  # With few examples the kernel is off.
        _Measured(kernel="winograd_channels", layer=_convolution(shape[-1]), shape=(8, *shape))
        for shape in ((7, 7, 256), (4, 4, 512))
    ),
    *(
        _Measured(kernel="float32_products", layer=_convolution(shape[-1]), shape=(64, *shape))
        for shape in ((32, 32, 16), (8, 8, 64), (7, 7, 256))
    ),
    _Measured(kernel="float32_products", layer=lambda: layers.Dense(256), shape=(64, 64, 256)),
)


def measure_kernels() -> dict:
    """{'kernels': [...]}: for each kernel and shape, milliseconds of CPU time of ours and of TensorFlow's.

    The layers' kernels compute forward and backward; 'on' says whether a run on this CPU uses the kernel.
    """
    used = StepOptions(precision=FLAGS.precision).kernels(devices_from_flags())
    found = [
        {
            "kernel": f"{one.kernel}{_of_activation(one)}, {'x'.join(map(str, one.shape))}",
            "on": bool(getattr(used, one.kernel)) and _gets_it(one, used),
            **_in_turn(_steps(one, dataclasses.replace(_PLAIN, **{one.kernel: 1})), _steps(one, _PLAIN)),
        }
        for one in _LAYERS
    ]
    return {"kernels": [*found, *_sums()]}


def _gets_it(one: _Measured, used: LayerKernels) -> bool:
    """Whether the kernel, if enabled, computes this shape and precision."""
    used = dataclasses.replace(used, num_examples=one.shape[0])
    if one.kernel == "winograd_channels":
        return used.winograd_gate.takes(one.shape, _multiplied_in(used), _kernel_of(one))
    if one.kernel == "compiled_relu":
        return math.prod(one.shape[1:]) >= compiled_relu.FEWEST_ELEMENTS
    if one.kernel == "examples_as_channels":
        return used.as_channels_gate.takes(one.shape, _multiplied_in(used), _kernel_of(one))
    if one.kernel == "compiled_batch_norm":  # One layer, without an exchange.
        return not used.fused_batch_norm
    return one.kernel != "compiled_activations" or math.prod(one.shape[1:]) >= FEWEST_ELEMENTS


def _multiplied_in(used: LayerKernels) -> str:
    """The precision in which convolutions multiply."""
    return "float32" if used.float32_products else FLAGS.precision


def _kernel_of(one: _Measured) -> tuple[int, ...]:
    """The shape of a convolution's kernel."""
    return 3, 3, one.shape[-1], one.shape[-1]


def _of_activation(one: _Measured) -> str:
    layer = one.layer()
    return f", {layer.activation.__name__}" if isinstance(layer, layers.Activation) else ""


def _steps(one: _Measured, kernels: LayerKernels) -> Callable[[], object]:
    """The layer's forward and backward pass with these kernels, as a function without arguments."""
    inputs = keras.Input(one.shape[1:], dtype=FLAGS.precision)
    policy = FLAGS.precision if FLAGS.precision == "float32" else f"mixed_{FLAGS.precision}"
    layer = one.layer()
    layer.dtype_policy = policy
    model = keras.Model(inputs, layer(inputs))
    draw = np.random.default_rng(0)
    x, upstream = (tf.cast(draw.normal(size=one.shape).astype(np.float32), FLAGS.precision) for _ in range(2))
    spec = tf.TensorSpec([None, *one.shape[1:]], FLAGS.precision)

    @tf.function(autograph=False, input_signature=[spec, spec])
    def step(x, upstream):
        with kernels.in_place(model), tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
        return tape.gradient(y, [x, *model.trainable_variables], upstream)

    return lambda: step(x, upstream)


def _sums() -> Iterator[dict]:
    """The sums of our ring beside TensorFlow's addition, and the casts that both need."""
    wire = WIRE_PRECISIONS[FLAGS.precision]
    own = np.random.default_rng(0).normal(size=_SUMMED).astype(np.float32)
    sent = np.zeros_like(own) if wire is None else np.zeros(_SUMMED, wire.as_numpy_dtype)
    tensor, received = tf.constant(own), tf.constant(sent)

    @tf.function(autograph=False)
    def add(tensor, received):
        total = tensor + tf.cast(received, tf.float32)
        return total if wire is None else tf.cast(total, wire)

    name = f"ring's sums, {_SUMMED} numbers"
    yield {"kernel": name, "on": True, **_in_turn(lambda: add_to(sent, own), lambda: add(tensor, received))}


def _in_turn(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds of CPU time of both over alternate measurements, and the median of their ratio."""
    calls = {name: (call, _calls_to_repeat(call)) for name, call in (("ours", ours), ("tensorflow", theirs))}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(FLAGS.measured_steps):
        for name, (call, count) in calls.items():
            found[name].append(_seconds(call, count))
    ratio = statistics.median(own / other for own, other in zip(found["ours"], found["tensorflow"], strict=True))
    return {**{f"{name}_ms": 1e3 * statistics.median(each) for name, each in found.items()}, "ratio": ratio}


def _calls_to_repeat(call: Callable[[], object]) -> int:
    """The number of calls that take `_SHORTEST_SECONDS`; first makes two calls, which compile."""
    call()
    call()
    return max(1, round(_SHORTEST_SECONDS / max(_seconds(call, 1), 1e-6)))


def _seconds(call: Callable[[], object], count: int) -> float:
    """CPU time of a call by all threads of this process."""
    started = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - started) / count
