"""Winograd's convolutions in compiled loops over a few images at a time, whose tiles stay in the CPU's cache.

Tiles have 2.25 times as many numbers as their images. Written to memory and read again between the transforms and
the products, they cost more than the products of 64 channels.

XLA compiles a loop for each number of images. Compiling all loops of ResNet-20 for the short last batch of an
epoch would take as long as ten steps. Such a batch is padded with zeros instead, and loops skip iterations that
would compute only zeros.

Tried, and did not pay (AMD EPYC, Zen 3). Shorter compilation: at LLVM's level 1 (xla_backend_optimization_level=1)
a loop compiles in 0.6 s of CPU time instead of 0.85, but 120 steps of ResNet-20 took 66.0 and 60.0 s, without it
62.5 and 65.5. At level 0 loops are five times slower; without LLVM's expensive passes steps take 1.5 times as
long; without fusion emitters loops run 1.15 to 1.25 times as long. Level 2 takes 0.85 of 1.0 s, other vectors or
one module 1.0. Fewer passes (128 images of 16x16x32): slices of images within the transform save 0.5 ms, but it is
not vectorized then and takes 4 ms instead of 0.3. Tiles transposed for the kernel's gradient save 0.4 ms and cost
5. XLA fills results with zeros first (0.4 ms): it has no buffers without values on CPUs. For 16 channels oneDNN
stays faster (8.6, 8.6 and 10.7 ms, ours 11.5, 11.3 and 13.2).
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # the only way to operations that only XLA has

from towers.layers.convolutions.winograd_transforms import INPUTS, OUTPUTS, cut, join, join_gradient

_NAME = "winograd"
# Tiles of an iteration: with many channels products are most of the work, and larger ones are faster.
_TILES, _TILES_OF_MANY_CHANNELS, _MANY_CHANNELS = 64, 256, 256
_COUNT = tf.TensorSpec([], tf.int32)


def num_tiles(length: int) -> int:
    """Number of tiles along images of this height or width."""
    return -(-length // OUTPUTS)


class CompiledCall(NamedTuple):
    """A function that XLA compiles for the shapes of its arguments, which are float32.

    Attributes:
      function: takes tensors of these shapes, and the number of images as an int32.
      shapes: shapes of the tensors.
    """

    function: Callable
    shapes: tuple[tuple[int, ...], ...]


class Loops:
    """The convolution of [N, H, W, C] with a transformed kernel [36, C, K], and the kernel's gradient.

    Attributes:
      convolution: (images, kernel, count) to outputs.
      kernel_gradient: (images, upstream, count) to the gradient of the kernel.

    Each is compiled for N images, and runs only the iterations with the first `count` images. The other images
    must be zeros; results for them are undefined.
    """

    def __init__(self, height: int, width: int, channels: int, filters: int):
        """Args: the images' height and width, and the kernel's input and output channels."""
        self._images, self._outputs = (_Images(height, width, number) for number in (channels, filters))
        most = _TILES_OF_MANY_CHANNELS if min(channels, filters) >= _MANY_CHANNELS else _TILES
        self._most_images = max(1, most // self._images.num_tiles)
        self._most_without_rest = max(1, most * 5 // 4 // self._images.num_tiles)
        self._kernel = INPUTS**2, channels, filters
        images, outputs, kernel = self._images.spec, self._outputs.spec, tf.TensorSpec(self._kernel)
        self.convolution = _compiled(self._convolution, images, kernel, _COUNT)
        self.kernel_gradient = _compiled(self._kernel_gradient, images, outputs, _COUNT)

    @classmethod
    @functools.cache
    def of(cls, height: int, width: int, channels: int, filters: int) -> "Loops":
        """The loops over such images, cached together with what TensorFlow compiled for them."""
        return cls(height, width, channels, filters)

    def turned(self) -> "Loops":
        """The loops from outputs to images; these loops themselves if both have as many channels."""
        return Loops.of(*self._images.spec.shape[1:3], self._kernel[2], self._kernel[1])

    def convolution_call(self, num_images: int) -> "CompiledCall":
        """The convolution, for this number of images."""
        return CompiledCall(self.convolution, (self._images.shape(num_images), self._kernel))

    def gradient_calls(self, num_images: int) -> list["CompiledCall"]:
        """The gradients of the images and of the kernel, for this number of images."""
        shapes = self._images.shape(num_images), self._outputs.shape(num_images)
        return [self.turned().convolution_call(num_images), CompiledCall(self.kernel_gradient, shapes)]

    def _convolution(self, images, kernel, count):
        num_images = tf.shape(images)[0]
        in_one, num_parts = self._parts(num_images)
        padded = _with_zeros(images, num_parts * in_one)

        def with_next(number, filled):
            tiles = self._images.to_tiles(cut, _rows(padded, number * in_one, in_one))
            found = self._outputs.from_tiles(join, tf.matmul(tiles, kernel))
            return number + 1, gen_xla_ops.xla_dynamic_update_slice(filled, found, [number * in_one, 0, 0, 0])

        start = tf.zeros([num_parts * in_one, *self._outputs.spec.shape[1:]])
        times = _iterations(count, in_one, num_parts)
        return tf.ensure_shape(_looped(times, with_next, start)[:num_images], self._outputs.spec.shape)

    def _kernel_gradient(self, images, upstream, count):
        in_one, num_parts = self._parts(tf.shape(images)[0])
        padded = [_with_zeros(one, num_parts * in_one) for one in (images, upstream)]

        def with_next(number, total):
            image, gradient = (_rows(one, number * in_one, in_one) for one in padded)
            tiles = self._images.to_tiles(cut, image)
            return number + 1, total + _apart(
                tf.matmul(tiles, self._outputs.to_tiles(join_gradient, gradient), transpose_a=True)
            )

        return _looped(_iterations(count, in_one, num_parts), with_next, tf.zeros(self._kernel))

    def _parts(self, num_images: tf.Tensor | int) -> tuple[tf.Tensor, tf.Tensor]:
        """The number of images of an iteration, and of iterations.

        Without a remainder nothing is padded, so a divisor of the number of images is chosen if one is near the
        maximum; otherwise iterations are nearly equal.
        """
        most = self._most_images
        divisors = tf.range(most // 2 + 1, self._most_without_rest + 1)
        fitting = tf.reduce_max(tf.where(num_images % divisors == 0, divisors, 0))
        least = tf.maximum(-(-num_images // most), 1)
        in_one = tf.where(fitting > 0, fitting, -(-num_images // least))
        # One iteration even without images: XLA compiles the body of a loop that never runs.
        return in_one, tf.maximum(-(-num_images // in_one), 1)

    def workspace_bytes(self, num_images: int, *, of_kernel: bool) -> int:
        """Bytes that XLA allocates besides the results, fitted to its own reports of 60 shapes.

        For the kernel's gradient of few images with unlike numbers of channels it is up to 1.45 times as much.

        Args:
          num_images: number of images that the loop is compiled for.
          of_kernel: whether it is the loop of the kernel's gradient.
        """
        with tf.init_scope(), tf.device("/CPU:0"):
            in_one, num_parts = map(int, self._parts(num_images))
        sides = self._images, self._outputs
        tiles = [_bytes(INPUTS**2, in_one * side.num_tiles, side.spec.shape[-1]) for side in sides]
        # After one of the two steps; OUTPUTS of INPUTS in one direction.
        halfway = max(tiles) * OUTPUTS // INPUTS
        padded = num_parts * in_one
        copies = [_bytes(padded, *side.spec.shape[1:]) for side in sides if padded != num_images]
        if of_kernel:
            return sum(tiles) + max(halfway, _bytes(*self._kernel) * (num_parts > 1)) + sum(copies)
        beside = min(tiles), halfway
        return max(tiles) + max(beside) + sum(copies) - self._in_results(num_images, max(tiles), beside, copies)

    def _in_results(self, num_images: int, tiles: int, beside: Sequence[int], copies: Sequence[int]) -> int:
        """Bytes that need no memory of their own: they lie in the results' memory until padded outputs are cut.

        Args:
          num_images: number of images of the results.
          tiles: bytes of the larger tiles.
          beside: bytes of what is in memory besides the tiles, one after the other.
          copies: bytes of the padded images and outputs; empty if none were padded.
        """
        if not copies:
            return 0
        results = _bytes(*self._outputs.shape(num_images))
        left = max((size for size in beside if size > results), default=0)
        return max(max(beside) - left, *(size if size <= results else 0 for size in (tiles, *copies)))


class _Images:
    """Images [N, H, W, C] and their tiles [36, N * tiles, C].

    Each transform works on columns and on rows one after the other: images are [n, length, rest] for it.
    """

    def __init__(self, height: int, width: int, channels: int):
        self.spec = tf.TensorSpec([None, height, width, channels])
        self._rows, self._columns = num_tiles(height), num_tiles(width)
        self.num_tiles = self._rows * self._columns

    def shape(self, num_images: int) -> tuple[int, ...]:
        """The shape of this number of images."""
        return num_images, *self.spec.shape[1:]

    def to_tiles(self, step: Callable, images: tf.Tensor) -> tf.Tensor:
        """Cuts images into tiles, with zeros behind the images' ends so that tiles are whole."""
        _, height, width, channels = self.spec.shape
        tall, wide = OUTPUTS * self._rows, OUTPUTS * self._columns
        filled = tf.pad(images, [[0, 0], [0, tall - height], [0, wide - width], [0, 0]])
        tiles = _apart(step(tf.reshape(filled, [-1, wide, channels])))
        tiles = _apart(step(tf.reshape(tiles, [-1, tall, self._columns * channels])))
        return tf.reshape(tiles, [INPUTS**2, -1, channels])

    def from_tiles(self, step: Callable, tiles: tf.Tensor) -> tf.Tensor:
        _, height, width, channels = self.spec.shape
        found = step(_apart(tf.reshape(tiles, [INPUTS, -1, self._rows, self._columns * channels])))
        found = step(_apart(tf.reshape(found, [INPUTS, -1, self._columns, channels])))
        found = _apart(tf.reshape(found, [-1, OUTPUTS * self._rows, OUTPUTS * self._columns, channels]))
        return found[:, :height, :width]


def loop_workspace_bytes(function: str, inputs: Sequence[tf.TensorShape]) -> int | None:
    """Bytes that XLA allocates besides the results of a loop; None if the function is not one of the loops.

    Args:
      function: its name in a graph.
      inputs: the shapes of its inputs.
    """
    found = re.search(rf"{_NAME}(_convolution|_kernel_gradient)_\d+$", function)
    if found is None:
        return None
    (num_images, *size, channels), second, _ = map(tuple, inputs)
    of_kernel = found[1] == "_kernel_gradient"
    kernel = (channels, second[-1]) if of_kernel else second[1:]
    return Loops.of(*size, *kernel).workspace_bytes(num_images, of_kernel=of_kernel)


def _bytes(*shape: int) -> int:
    return math.prod(shape) * tf.float32.size


def _compiled(function: Callable, *specs: tf.TensorSpec) -> Callable:
    def call(*tensors):
        return function(*tensors)

    # The name of the call in graphs.
    call.__name__ = f"{_NAME}{function.__name__}"
    compiled = tf.function(call, jit_compile=True, autograph=False, input_signature=specs)

    @functools.cache
    def traced():
        # A tf.function retraces for each strategy of tf.distribute, and XLA would compile each trace.
        with tf.init_scope(), tf.device(None):
            return compiled.get_concrete_function()

    return lambda *tensors: traced()(*tensors)


def _iterations(count: tf.Tensor, in_one: tf.Tensor, num_parts: tf.Tensor) -> tf.Tensor:
    """The number of iterations for `count` images; a constant for a single part, so that XLA makes no loop."""
    return tf.where(num_parts == 1, 1, -(-count // in_one))


def _looped(count: tf.Tensor, body: Callable, start: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda number, _: number < count, body, (0, start))[1]


def _with_zeros(images: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The images, padded with zeros to `count`; XLA copies nothing if there are as many already."""
    return tf.pad(images, [[0, count - tf.shape(images)[0]], [0, 0], [0, 0], [0, 0]])


def _rows(images: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    return tf.slice(images, [first, 0, 0, 0], [count, *images.shape[1:]])


def _apart(numbers: tf.Tensor) -> tf.Tensor:
    """The same numbers, in a loop of their own: XLA would recompute them for each number that depends on them.

    Reshape before, not after: XLA copies what is reshaped afterwards and sliced.
    """
    return gen_xla_ops.xla_optimization_barrier([numbers])[0]
