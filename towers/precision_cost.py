"""How much slower a precision is than float32 on this CPU, measured in less than a second."""

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers.quiet_stderr import stderr_aside

# A step of a small network: a convolution of images [N, 8, 8, 64], and a product of matrices [64 N, 64] and
# [64, 64].
_SIZE, _CHANNELS = 8, 64
# A few examples suffice to predict the cost of many. More are more exact: with few, calls take longer than the
# arithmetic.
_EXAMPLES = (1, 4, 16, 64, 256)
_REPETITIONS = 4
_GEOMETRY = {"strides": [1, 1, 1, 1], "padding": "SAME"}


def cost_of(precision: str, *, float32_products: bool = False, budget_seconds: float = 0.8) -> float:
    """CPU time of a step in this precision, divided by that in float32.

    CPU time does not depend on other programs on the machine. Both precisions are measured in turn, with as many
    examples as the budget allows.

    Args:
      precision: 'bfloat16' or 'float16'.
      float32_products: as in `towers.layers.kernels.LayerKernels`.
      budget_seconds: approximate CPU time of the whole measurement.
    """
    started, cost = time.process_time(), 1.0
    # TensorFlow logs an error where oneDNN has no kernels for the precision; that is what is measured here.
    with tf.device("/device:CPU:0"), stderr_aside():
        for count in _EXAMPLES:
            steps = [_step_of(count, "float32"), _step_of(count, precision, float32_products)]
            times = [[_seconds(step) for step in steps] for _ in range(1 + _REPETITIONS)]
            # The first repetition makes oneDNN's kernels.
            full, short = (min(each) for each in zip(*times[1:], strict=True))
            cost = short / max(full, 1e-9)
            next_seconds = 4 * (1 + _REPETITIONS) * (full + short)
            if time.process_time() - started + next_seconds > budget_seconds:
                break
    return cost


def cost_text(cost: float) -> str:
    """'about 1.8 times slower than float32 on this CPU'; from 10 on rounded to two digits, without decimals."""
    digits = f"{cost:.2g}" if cost < 10 else f"{float(f'{cost:.2g}'):.0f}"
    return f"about {digits} times slower than float32 on this CPU"


def _step_of(count: int, precision: str, float32_products: bool = False) -> Callable[[], None]:
    """Forward and backward pass of the convolution and of the product, without the tape's own time."""
    draw = np.random.default_rng(0)

    def drawn(*shape: int) -> tf.Tensor:
        return tf.cast(draw.normal(size=shape).astype(np.float32), precision)

    def multiplied(operation: Callable[..., tf.Tensor], *tensors: tf.Tensor, **options) -> tf.Tensor:
        wide = [tf.cast(tensor, "float32" if float32_products else precision) for tensor in tensors]
        return tf.cast(operation(*wide, **options), precision)

    images, kernel = drawn(count, _SIZE, _SIZE, _CHANNELS), drawn(3, 3, _CHANNELS, _CHANNELS)
    rows, matrix = tf.reshape(images, [-1, _CHANNELS]), drawn(_CHANNELS, _CHANNELS)

    def of_inputs(kernel, upstream):
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=images.shape, filter=kernel, out_backprop=upstream, **_GEOMETRY
        )

    def of_kernel(inputs, upstream):
        return tf.raw_ops.Conv2DBackpropFilter(
            input=inputs, filter_sizes=kernel.shape, out_backprop=upstream, **_GEOMETRY
        )

    def step() -> None:
        outputs = multiplied(tf.nn.conv2d, images, kernel, **_GEOMETRY)
        multiplied(of_inputs, kernel, outputs)
        multiplied(of_kernel, images, outputs)
        product = multiplied(tf.matmul, rows, matrix)
        multiplied(tf.matmul, product, matrix, transpose_b=True)
        multiplied(tf.matmul, rows, product, transpose_a=True)

    return step


def _seconds(step: Callable[[], None]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started
