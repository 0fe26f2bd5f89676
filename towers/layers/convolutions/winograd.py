"""3x3 convolutions in float32 with fewer multiplications: Winograd's F(4x4, 3x3), forward and backward.

Source: Lavin and Gray 2015 (arXiv:1509.09308), with the points 0, 1, -1, 2, -2 and infinity. A tile of 4x4 outputs
takes 36 multiplications for each pair of channels, not 144:

    images -- cut into 6x6 tiles d -> B' d B  [36, tiles, C] --+
                                                               +--> 36 matrix products m --> A' m A  4x4 outputs
    kernel g -----------------------> G g G'  [36, C, K] ------+

The gradient of the images is the convolution of the outputs' gradient with the kernel turned by half a circle, so
it runs the same compiled loop, if there are as many output channels as input channels. All three steps are linear,
so the gradient of the kernel is the same products with transposed matrices, in a loop of its own. Loops go over a
few images at a time (`winograd_loops.py`). The kernel is transformed again in the backward pass, because it has
four times as many numbers then.

Rounding differs from a direct convolution's: results are up to 7e-6 of their norm away from exact ones (4 million
numbers drawn from a normal distribution; a direct convolution's 3e-7).

Time of ours / oneDNN's, forward and backward, by the number of examples (Intel Xeon with AMX, for AVX2 with CPUID
masked; one thread CPU time, two threads by the clock; medians of five or seven in turn):

                     AVX2                     two threads     AVX-512               two threads
                     8      16     more       16     more     16     more           16     more
    8x8x32                  0.88   128: 0.79
    16x16x32         0.83   0.78   128: 0.78                  1.14   128: 1.27
    32x32x32                0.80   64: 0.86
    8x8x64           0.69   0.60   128: 0.56  0.61   1.07     0.80   128: 0.78      0.84   128: 1.55
    15x15x64                0.66   256: 0.68                  0.88   256: 0.91
    32x32x64                0.59              1.14            0.83   64: 0.80       1.63
    15x15x64 to 256                64: 0.66                          64: 0.80
    7x7x64                  0.74   128: 0.69
    8x8x128                 0.55   64: 0.56   0.80   0.87     0.68   64: 0.74       0.94   64: 1.07
    16x16x128                                        0.83            64: 0.70              64: 1.08
    7x7x256                 0.63   64: 0.61   0.69   0.65     0.77   64: 0.77       0.80   64: 0.84
    8x8x256                                                   0.61   64: 0.62              64: 0.68
    4x4x512          1.64   0.88   64: 0.47                   0.95   128: 0.38             64: 0.52

On an AMD EPYC (Zen 3, AVX2 alone, one thread, medians of five or seven in turn):

    64 examples     16x16x32 0.73, 8x8x64 0.59, 15x15x64 0.60, 8x8x128 0.56, 7x7x256 0.59, 4x4x512 0.37
    fewer           8x8x64      1: 1.04    2: 0.94     4: 0.92     8: 0.72
                    16x16x32    1: 0.83    4: 0.85    16: 0.78
                    7x7x256     1: 3.4     4: 1.35     8: 1.09    16: 0.74
                    4x4x512     1: 2.9     8: 2.1     16: 1.08    32: 0.66

On an AMD EPYC (Zen 4, AVX-512 in halves; one thread CPU time, two by the clock, medians of nine in turn):

                     8      32     64     128        two threads    16     64     128
    16x16x32         0.91   0.87   0.88   0.87       8x8x64         1.05   1.06   1.04
    8x8x32           0.98   0.97   0.91   0.98       16x16x64       1.01   0.95   0.94
    32x32x32         0.84   0.82   0.82   0.82       8x8x128        0.83   0.75   0.72
    64x64x32         0.70   0.67                     16x16x128      0.70   0.64   0.63
    8x8x32 to 64     0.86   0.80   0.77   0.75       7x7x256        0.79   0.95   0.67
                                                     4x4x512        1.24   0.67   0.56

Hence 32 channels there, as with AVX2 alone: a step of ResNet-20 takes 583 to 588 CPU ms, with 64 channels 609 to
626, with 16 735 to 743 (least of eight runs in each of three processes). A first step takes 3.9 s instead of
2.8.

Images that fill their tiles badly need more channels, hence `Gate._saves` (64 examples, one thread, medians of
seven in turn, an Intel Xeon with AMX, for AVX2 with CPUID masked; (-) is left out):

    pixels       7        10       11       12       13       14       15       16       20       28
    left         0.33     0.36     0.30     0.25     0.38     0.33     0.28     0.25     0.25     0.25
    AVX-512, 64  1.07(-)  1.24(-)  1.07(-)  0.94     1.30(-)  1.11(-)  1.01     0.90     0.90     0.91
        96       0.98     1.09(-)                             0.92                       0.75     0.75
        128      0.91     1.00              0.78     1.04(-)  0.88                       0.68     0.66
        192      0.81                       0.76     0.89     0.78                       0.59     0.58
    AVX2, 32     1.10(-)  1.08(-)  0.99(-)  0.87     1.13(-)  1.03(-)  0.93
        64       0.82     0.87              0.65     0.92(-)  0.82
    two threads, by the clock:
    AVX-512, 256 0.93     1.01              0.74     1.01     0.86     0.78
    AVX2, 128    0.86     0.85                       0.96     0.73

Two threads need more channels anyway, and these make up for such tiles.

With many channels and few tiles the kernel's transforms are most of the work, hence the minimum number of pixels.
Left out as well: 3x3x256 with 16 examples (1.40 when tiles were written to memory). XLA compiles two loops for
each size of images and number of channels (three if the kernel has other outputs than inputs), and for each tower,
in 0.3 s each (Zen 3: 0.5 to 1 s). Before the forward pass and the gradient of the images shared a loop, the first
step of two towers took 9.1 to 10.1 s instead of 6.8 to 7.9 (ResNet-20, Zen 3, three rounds in turn; VGG-16, one
round, 27 instead of 17); later steps take 0.92 to 1.05 of the CPU time that they took then (seven rounds). A short
last batch runs the same loops, also where direct convolutions of so few examples would be faster. A step of
ResNet-20 takes 0.98 of its CPU time with AVX-512 (three rounds in turn: 0.95 to 0.99), 0.92 with AVX2 on Intel,
and 0.87 on the Zen 3 (least of 12 steps in three rounds in turn: 1,046 to 1,140 and 1,246 to 1,310 ms).

Tried, and slower: all tiles in memory between transforms and products (1.3 to 2 times the time for up to 64
channels); transforms as sums of products with columns of the matrices (1.7 times); TensorFlow's own operations
(8 to 17 times). Both gradients in one loop would save a transform (0.92 to 0.99 of the time), but a pipeline may
compute them at different times, and a layer may need only one.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.layers.convolutions.replaced import after, gradient_scope, plain_convolutions
from towers.layers.convolutions.winograd_loops import CompiledCall, Loops, num_tiles
from towers.layers.convolutions.winograd_transforms import INPUTS
from towers.precision import SHORT_PRECISIONS

_KERNEL_TRANSFORM = (  # G
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
# The transform of both of a kernel's dimensions: [36, 9].
_KERNEL_TRANSFORMS = np.kron(_KERNEL_TRANSFORM, _KERNEL_TRANSFORM).astype(np.float32)
# Tiles reach over an image's edge. The largest accepted ratio of their multiplications to a direct convolution's.
_MOST_MULTIPLICATIONS = 0.4
# Minimum number of pixels of all images of a call: with fewer, the kernel's transforms are most of the work.
_FEWEST_PIXELS = 512


@dataclasses.dataclass(frozen=True)
class Gate:
    """Which convolutions are computed by this method.

    Attributes:
      fewest_channels: minimum number of channels of the inputs and of the outputs.
      num_examples: of a usual call; None if there are always enough. Smaller calls are padded to it, so that XLA
        compiles nothing for them.
      num_threads: number of threads of a tower; 0 if it is not known. `fewest_channels` is its square times that
        for one thread.
    """

    fewest_channels: int
    num_examples: int | None = None
    num_threads: int = 0

    def convolve(self, inputs: tf.Tensor, kernel: tf.Tensor, stride: int = 1) -> tf.Tensor | None:
        """The convolution of [N, H, W, C] with [3, 3, C, K] and edges of zeros.

        Args:
          inputs, kernel, stride: any.

        Returns:
          The outputs; None if this method does not take them, or in `tf.vectorized_map`, which cannot vectorize
          compiled loops.
        """
        if not self.takes(inputs.shape, inputs.dtype, kernel.shape, stride) or _is_vectorized():
            return None
        loops = Loops.of(*inputs.shape[1:3], *kernel.shape[2:])
        convolution = _Convolution(tf.shape(inputs)[0], self.num_examples or 0)
        outputs = convolution.outputs(loops, inputs, tf.convert_to_tensor(kernel, inputs.dtype))
        return tf.ensure_shape(outputs, [*inputs.shape[:-1], kernel.shape[-1]])

    def num_replaced(self, model: keras.Model, *, float32_products: bool = False) -> int:
        """The number of the model's layers that are computed by this method.

        Args:
          model: any model.
          float32_products: as for `towers.layers.kernels.LayerKernels`.
        """
        return len({layer for layer, _ in self._taken(model, float32_products)})

    def compiled_calls(
        self, model: keras.Model, num_examples: int, *, float32_products: bool = False
    ) -> list[CompiledCall]:
        """The loops of the model's layers, in the order in which a training pass first calls them.

        Args:
          model, float32_products: as for `num_replaced`.
          num_examples: number of examples of a call; the loops are for the usual number if that is larger.
        """
        num_images = max(num_examples, self.num_examples or 0)
        forward, backward = [], []
        for layer, shape in self._taken(model, float32_products):
            loops = Loops.of(*shape[1:3], *layer.kernel.shape[2:])
            forward.append(loops.convolution_call(num_images))
            backward[:0] = loops.gradient_calls(num_images)
        return list(dict.fromkeys(forward + backward))

    def _taken(
        self, model: keras.Model, float32_products: bool
    ) -> Iterator[tuple[keras.layers.Conv2D, Sequence[int | None]]]:
        """Each layer that is computed by this method, with the shape of each of its inputs."""
        for layer in plain_convolutions(model):
            for shape in _shapes_of_inputs(layer):
                computed_in = _computed_in(layer, float32_products)
                if self.takes(shape, computed_in, layer.kernel.shape, layer.strides[0]):
                    yield layer, shape

    def takes(self, shape: Sequence[int | None], dtype, kernel: Sequence[int], stride: int = 1) -> bool:
        """Whether inputs of this shape and dtype are convolved with a kernel of that shape by this method."""
        *size, channels, filters = kernel
        if tf.as_dtype(dtype) != tf.float32 or [*size, stride] != [3, 3, 1] or None in shape[1:]:
            return False
        height, width, _ = shape[1:]
        if self.num_examples is not None and self.num_examples * height * width < _FEWEST_PIXELS:
            return False
        return min(channels, filters) >= self.fewest_channels and self._saves(height, width, channels, filters)

    def _saves(self, height: int, width: int, channels: int, filters: int) -> bool:
        """Whether tiles of such images save enough multiplications.

        Our time / a direct convolution's is about left * (2 + 1.5 * fewest / channels). `left` is the ratio of the
        multiplications, 0.25 for images of whole tiles; `fewest` is the fewest channels for one thread.
        """
        fewest = self.fewest_channels / max(1, self.num_threads) ** 2
        left = num_tiles(height) * num_tiles(width) * INPUTS**2 / (height * width * 9)
        mean = 2 * channels * filters / (channels + filters)
        return left <= _MOST_MULTIPLICATIONS and left * (2 + 1.5 * fewest / mean) <= 1


def _is_vectorized() -> bool:
    """Whether TensorFlow is tracing a graph that it will vectorize, which it names accordingly."""
    return any(part.startswith("loop_body") for part in tf.get_current_name_scope().split("/"))


def _computed_in(layer: keras.layers.Layer, float32_products: bool) -> str:
    return "float32" if float32_products and layer.compute_dtype in SHORT_PRECISIONS else layer.compute_dtype


def _shapes_of_inputs(layer: keras.layers.Layer) -> list[tuple[int | None, ...]]:
    return [tensor.shape for node in layer._inbound_nodes for tensor in node.input_tensors]


class _Convolution:
    """Convolutions of one number of images, and their gradients, in compiled loops.

    Convolution and kernel gradient are bilinear maps whose gradients are these maps again, so there are gradients
    of any order.
    """

    def __init__(self, num_images: tf.Tensor, at_least: int):
        """Args:
        num_images: number of images of each call; loops run for at least `at_least` images.
        """
        self._num_images = num_images
        # TensorFlow copies nothing where nothing is missing.
        missing = tf.maximum(at_least - num_images, 0) if at_least else None
        self._missing = None if missing is None else tf.stack([tf.stack([0, missing]), *[[0, 0]] * 3])
        self._scope = gradient_scope()

    def outputs(self, loops: Loops, images: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """[N, H, W, K] for images [N, H, W, C], a kernel [3, 3, C, K] and the loops of these shapes."""

        @tf.custom_gradient
        def convolution(images, kernel):
            def gradients(upstream):
                # For a Jacobian TensorFlow vectorizes the backward pass.
                if _is_vectorized():
                    return _direct_gradients(images, kernel, upstream)
                with tf.name_scope(self._scope):
                    of_images = self._images_gradient(loops, upstream, kernel)
                    return of_images, self._kernel_gradient(loops, images, upstream)

            # Not before the images are computed: the transformed kernel would take memory until then.
            transformed = _transformed(*after(images, kernel))
            found = self._run(loops.convolution, self._filled(images), transformed)
            # The length is known if the inputs' is, as predictions of memory need.
            return tf.slice(found, [0, 0, 0, 0], [self._num_images, *found.shape[1:]]), gradients

        return convolution(images, kernel)

    def _images_gradient(self, loops: Loops, upstream: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """[N, H, W, C], for the gradient of the outputs."""
        return self.outputs(loops.turned(), upstream, _turned(*after(upstream, kernel)))

    def _kernel_gradient(self, loops: Loops, images: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        """[3, 3, C, K], for the gradient of the outputs."""

        @tf.custom_gradient
        def gradient(images, upstream):
            def gradients(of_kernel):
                return self._images_gradient(loops, upstream, of_kernel), self.outputs(loops, images, of_kernel)

            # Padded again: a short batch's padded copy would be kept in memory since the forward pass.
            again = self._filled(*after(upstream, images))
            return _transform_gradient(self._run(loops.kernel_gradient, again, self._filled(upstream))), gradients

        return gradient(images, upstream)

    def _run(self, loop, *tensors) -> tf.Tensor:
        # As in `compiled_activations`: a tensor from a branch of tf.cond must not itself be a function's argument.
        count = tf.identity(self._num_images)
        # Within two tapes TensorFlow would look for the gradient of the loop, which has none.
        return loop(*map(tf.stop_gradient, tensors), count)

    def _filled(self, images: tf.Tensor) -> tf.Tensor:
        return images if self._missing is None else tf.pad(images, self._missing)


def _direct_gradients(images, kernel, upstream) -> tuple[tf.Tensor, tf.Tensor]:
    given = {"out_backprop": upstream, "strides": [1] * 4, "padding": "SAME"}
    return (
        tf.raw_ops.Conv2DBackpropInput(input_sizes=tf.shape(images), filter=kernel, **given),
        tf.raw_ops.Conv2DBackpropFilter(input=images, filter_sizes=tf.shape(kernel), **given),
    )


def _turned(kernel: tf.Tensor) -> tf.Tensor:
    """[3, 3, C, K] by half a circle, to [3, 3, K, C]."""
    return tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])


def _transformed(kernel: tf.Tensor) -> tf.Tensor:
    """[3, 3, C, K] to [36, C, K]."""
    _, _, channels, filters = kernel.shape
    return tf.reshape(tf.matmul(_KERNEL_TRANSFORMS, tf.reshape(kernel, [9, -1])), [INPUTS**2, channels, filters])


def _transform_gradient(transformed: tf.Tensor) -> tf.Tensor:
    """[36, C, K] to [3, 3, C, K]."""
    _, channels, filters = transformed.shape
    found = tf.matmul(_KERNEL_TRANSFORMS, tf.reshape(transformed, [INPUTS**2, -1]), transpose_a=True)
    return tf.reshape(found, [3, 3, channels, filters])
