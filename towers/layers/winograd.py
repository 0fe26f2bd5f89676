"""3x3 convolutions in float32 with fewer multiplications: Winograd's F(4x4, 3x3), forward and backward.

Source: Lavin and Gray 2015 (arXiv:1509.09308), with the points 0, 1, -1, 2, -2 and infinity. A tile of 4x4 outputs
takes 36 multiplications for each pair of channels, not 144:

    images -- cut into 6x6 tiles d -> B' d B  [36, tiles, C] --+
                                                               +--> 36 matrix products m --> A' m A  4x4 outputs
    kernel g -----------------------> G g G'  [36, C, K] ------+

All three are linear, so gradients are the same products with transposed matrices. The transforms of images are
compiled: loops that read and write memory once. The backward pass transforms images and kernel again, because
transformed they have 2.25 and 4 times as many numbers.

Rounding differs from a direct convolution's: results are up to 7e-6 of their norm away from exact ones (4 million
numbers drawn from a normal distribution; a direct convolution's 3e-7).

CPU time of ours / oneDNN's, forward and backward, by the number of examples (AMD EPYC, Zen 3 with AVX2, one
thread, medians of nine in turn):

                         8      16     64     more
    16x16x32             0.82   0.81   0.71   512: 1.02
    8x8x64               0.80   0.83   0.53   512: 0.59
    15x15x64                    0.65   0.72   256: 0.96
    15x15x64 to 256             0.57   0.61   256: 0.58
    32x32x64                    0.54   0.54   128: 0.69
    7x7x256              0.71   0.55   0.52   256: 0.53
    4x4x512              1.22   0.84   0.39
    8x8x256; 16x16x128                        128: 0.38; 0.50

Batches of fewer than 24 tiles are slower, because of the kernel's transforms: four examples of 8x8x64, 1.10.
Slower too, and left out: 3x3x256 with 16 examples (1.40), 31x31x24 to 64 with 256 examples (1.23), two threads
with 32 channels (1.21 by the clock; with 64 and more 0.53 to 0.79). XLA compiles four loops for each size of
images and number of channels, for each number of examples and each tower: 0.3 to 0.7 s each.

With AVX-512 products take half the time and transforms as long, so only more channels gain (Intel Xeon with AMX;
one thread, and two by the clock; VGG-16 makes 159 images/s instead of 116, cifar_fast 442 instead of 397):

                         16     64     256           16     64     256
    8x8x64               0.85   0.81   0.95          0.99   1.33   0.99
    32x32x64             0.94   1.21   1.44          0.94   1.22   1.49
    15x15x64 to 256      0.62   0.94   1.05          0.62   1.13   1.00
    8x8x128              0.64   0.66   0.81          0.81   0.73   0.81
    16x16x128            0.69   0.79   0.84          0.71   0.81   0.84
    32x32x128            0.73   0.78   0.89          0.77   0.79   0.91
    7x7x256              0.68   0.62   0.70          0.89   0.71   0.75
    8x8x256              0.57   0.48   0.55          0.65   0.59   0.57
    4x4x512              1.02   0.42   0.30          0.95   0.46   0.30

Where the time goes, 128 examples of 8x8x64 (Zen 3), ms: tiles of images twice 3.7, images of products 2.1, tiles
of their gradients 1.6, images of tiles' gradients 2.4, products 8.5. Tried, and slower: the transforms by
TensorFlow's own operations (additions or products with the small matrices, 8 to 17 times as long), images padded
for whole tiles (1.4 to 1.9 times), cropping inside a loop (4 times for 7x7).
"""

import functools
import re
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.layers.convolutions import after, gradient_scope, plain_convolutions
from towers.precision import SHORT_PRECISIONS

_NAME = "winograd"
# By step: what lies between its two ways, as a multiple of the images (read in allocator traces).
_WORKSPACE = {"_cut": 1.5, "_join_gradient": 1.5, "_join": 3.0, "_cut_gradient": 3.375}
# Outputs of a tile in each direction; the inputs that they need.
_OUTPUTS, _INPUTS = 4, 6
_IMAGE_TRANSFORM = (  # B'
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_KERNEL_TRANSFORM = (  # G
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
# Of both of a kernel's dimensions: [36, 9].
_KERNEL_TRANSFORMS = np.kron(_KERNEL_TRANSFORM, _KERNEL_TRANSFORM).astype(np.float32)
_OUTPUT_TRANSFORM = (  # A'
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)
# Tiles reach over an image's edge: the multiplications left, as a part of a direct convolution's.
_MOST_MULTIPLICATIONS = 0.4


def convolve(inputs: tf.Tensor, kernel: tf.Tensor, *, fewest_channels: int) -> tf.Tensor | None:
    """The convolution of [N, H, W, C] with [3, 3, C, K], stride 1 and edges of zeros.

    Args:
      inputs, kernel: of any shape and dtype.
      fewest_channels: of the inputs and of the outputs.

    Returns:
      None if it does not take the shape, the dtype or the number of channels.
    """
    if not _takes(inputs.shape, inputs.dtype, kernel.shape, fewest_channels):
        return None
    return _convolved(inputs, tf.convert_to_tensor(kernel, inputs.dtype))


def num_replaced(model: keras.Model, fewest_channels: int, *, float32_products: bool = False) -> int:
    """The number of the model's layers whose convolution is this one.

    Args:
      model: any model.
      fewest_channels: as for `convolve`.
      float32_products: as for `towers.layers.kernels.LayerKernels`.
    """
    return sum(
        any(
            _takes(shape, _computed_in(layer, float32_products), layer.kernel.shape, fewest_channels)
            for shape in _shapes_of_inputs(layer)
        )
        for layer in plain_convolutions(model)
    )


def _computed_in(layer: keras.layers.Layer, float32_products: bool) -> str:
    return "float32" if float32_products and layer.compute_dtype in SHORT_PRECISIONS else layer.compute_dtype


def _takes(shape: Sequence[int | None], dtype, kernel: Sequence[int], fewest_channels: int) -> bool:
    *size, channels, filters = kernel
    if tf.as_dtype(dtype) != tf.float32 or size != [3, 3] or None in shape[1:]:
        return False
    return min(channels, filters) >= fewest_channels and _saves(*shape[1:3])


def _saves(height: int, width: int) -> bool:
    """Whether tiles of such images save enough multiplications."""
    left = _num_tiles(height) * _num_tiles(width) * _INPUTS**2
    return left <= _MOST_MULTIPLICATIONS * height * width * 9


def _shapes_of_inputs(layer: keras.layers.Layer) -> list[tuple[int | None, ...]]:
    return [tensor.shape for node in layer._inbound_nodes for tensor in node.input_tensors]


def _num_tiles(length: int) -> int:
    return -(-length // _OUTPUTS)


def _convolved(inputs, kernel):
    height, width = inputs.shape[1:3]
    channels, filters = kernel.shape[2:]
    input_tiles, output_tiles = _Tiles.of(height, width, channels), _Tiles.of(height, width, filters)
    scope = gradient_scope()

    @tf.custom_gradient
    def convolution(inputs, kernel):
        def gradient(upstream):
            with tf.name_scope(scope):
                products_gradient = output_tiles.join_gradient(upstream)
                # Not before the backward pass: they would be the forward pass's, kept until now.
                images, again = after(upstream, inputs, kernel)
                turned = _transformed(tf.transpose(again, [0, 1, 3, 2]))
                tiles_gradient = tf.matmul(input_tiles.cut(images), products_gradient, transpose_a=True)
                return input_tiles.cut_gradient(products_gradient @ turned), _transform_gradient(tiles_gradient)

        (later,) = after(inputs, kernel)
        return output_tiles.join(input_tiles.cut(inputs) @ _transformed(later)), gradient

    return tf.ensure_shape(convolution(inputs, kernel), [*inputs.shape[:-1], filters])


def _transformed(kernel: tf.Tensor) -> tf.Tensor:
    """[3, 3, C, K] to [36, C, K]."""
    _, _, channels, filters = kernel.shape
    return tf.reshape(tf.matmul(_KERNEL_TRANSFORMS, tf.reshape(kernel, [9, -1])), [_INPUTS**2, channels, filters])


def _transform_gradient(transformed: tf.Tensor) -> tf.Tensor:
    """[36, C, K] to [3, 3, C, K]."""
    _, channels, filters = transformed.shape
    found = tf.matmul(_KERNEL_TRANSFORMS, tf.reshape(transformed, [_INPUTS**2, -1]), transpose_a=True)
    return tf.reshape(found, [3, 3, channels, filters])


class _Tiles:
    """The transforms of images [N, H, W, C] to tiles [36, N * tiles, C] and back, and their gradients.

    Each works on columns and on rows one after the other: images are [n, length, rest] for it.
    """

    def __init__(self, height: int, width: int, channels: int):
        self._height, self._width = height, width
        self._rows, self._columns = _num_tiles(height), _num_tiles(width)
        tall, wide = _OUTPUTS * self._rows, _OUTPUTS * self._columns
        self._beyond = [[0, 0], [0, tall - height], [0, wide - width], [0, 0]]
        images, tiles = [None, tall, wide, channels], [_INPUTS**2, None, channels]
        self._cut = _compiled(self._to_tiles, _cut, images)
        self._cut_gradient = _compiled(self._to_images, _cut_gradient, tiles)
        self._join = _compiled(self._to_images, _join, tiles)
        self._join_gradient = _compiled(self._to_tiles, _join_gradient, images)

    @classmethod
    @functools.cache
    def of(cls, height: int, width: int, channels: int) -> "_Tiles":
        """The transforms of such images; TensorFlow keeps what it compiled with them."""
        return cls(height, width, channels)

    def cut(self, images: tf.Tensor) -> tf.Tensor:
        """B' d B of each tile d of 6x6 numbers: 4x4 of the image and those around them, zeros beyond it."""
        return self._cut(self._filled(images))

    def cut_gradient(self, upstream: tf.Tensor) -> tf.Tensor:
        return self._cropped(self._cut_gradient(upstream))

    def join(self, products: tf.Tensor) -> tf.Tensor:
        """A' m A of each product m, side by side."""
        return self._cropped(self._join(products))

    def join_gradient(self, upstream: tf.Tensor) -> tf.Tensor:
        return self._join_gradient(self._filled(upstream))

    def _filled(self, images):
        """With zeros, so that whole tiles fill it."""
        return tf.pad(images, self._beyond) if np.any(self._beyond) else images

    def _cropped(self, images):
        return images[:, : self._height, : self._width] if np.any(self._beyond) else images

    def _to_tiles(self, step, images):
        _, tall, wide, channels = images.shape
        tiles = step(tf.reshape(images, [-1, wide, channels]))
        tiles = step(tf.reshape(tiles, [-1, tall, self._columns * channels]))
        return tf.reshape(tiles, [_INPUTS**2, -1, channels])

    def _to_images(self, step, tiles):
        channels = tiles.shape[-1]
        images = step(tf.reshape(tiles, [_INPUTS, -1, self._rows, self._columns * channels]))
        images = step(tf.reshape(images, [_INPUTS, -1, self._columns, channels]))
        return tf.reshape(images, [-1, _OUTPUTS * self._rows, _OUTPUTS * self._columns, channels])


def _compiled(both_ways: Callable, step: Callable, shape: Sequence[int | None]) -> Callable:
    def call(x):
        return both_ways(step, x)

    # Graphs name the call so.
    call.__name__ = f"{_NAME}{step.__name__}"
    return tf.function(call, jit_compile=True, autograph=False, input_signature=[tf.TensorSpec(shape)])


def loop_workspace_bytes(function: str, images_bytes: int) -> int | None:
    """What XLA allocates beside the result of a transform; None if the function is none.

    Args:
      function: its name in a graph.
      images_bytes: of the images, of whole tiles.
    """
    found = re.search(rf"{_NAME}({'|'.join(_WORKSPACE)})_\d+$", function)
    return None if found is None else round(_WORKSPACE[found[1]] * images_bytes)


def _cut(x):
    """[n, 4 T, rest] to [6, n, T, rest]: B' of 4 numbers, the one before and the one after them."""
    first, second, third, fourth = _apart(x)
    return tf.stack(_combined(_IMAGE_TRANSFORM, [_later(fourth), first, second, third, fourth, _earlier(first)]))


def _cut_gradient(upstream):
    before, first, second, third, fourth, after = _combined(_transposed(_IMAGE_TRANSFORM), tf.unstack(upstream))
    return _interleaved([first + _later(after), second, third, fourth + _earlier(before)])


def _join(products):
    """[6, n, T, rest] to [n, 4 T, rest]: A' of each 6 products."""
    return _interleaved(_combined(_OUTPUT_TRANSFORM, tf.unstack(products)))


def _join_gradient(upstream):
    return tf.stack(_combined(_transposed(_OUTPUT_TRANSFORM), _apart(upstream)))


def _apart(x: tf.Tensor) -> list[tf.Tensor]:
    """[n, 4 T, rest] to 4 of [n, T, rest]: every fourth number, from the first, the second, ..."""
    _, length, rest = x.shape
    return tf.unstack(tf.reshape(x, [-1, length // _OUTPUTS, _OUTPUTS, rest]), axis=2)


def _interleaved(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The inverse of `_apart`."""
    _, count, rest = parts[0].shape
    return tf.reshape(tf.stack(parts, 2), [-1, len(parts) * count, rest])


def _later(part: tf.Tensor) -> tf.Tensor:
    """[n, T, rest]: each number one place later, behind a zero."""
    return tf.pad(part[:, :-1], [[0, 0], [1, 0], [0, 0]])


def _earlier(part: tf.Tensor) -> tf.Tensor:
    return tf.pad(part[:, 1:], [[0, 0], [0, 1], [0, 0]])


def _combined(matrix: Sequence[Sequence[int]], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """matrix @ parts, without multiplications by 0 and 1."""
    return [sum(_times(factor, part) for factor, part in zip(row, parts, strict=True) if factor) for row in matrix]


def _times(factor: int, part: tf.Tensor) -> tf.Tensor:
    return part if factor == 1 else factor * part


def _transposed(matrix: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return list(zip(*matrix, strict=True))
