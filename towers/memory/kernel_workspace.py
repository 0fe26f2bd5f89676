"""What TensorFlow's CPU kernels allocate besides their outputs, in bytes.

Source: the allocations of a traced step (TensorFlow 2.21, two cores without oneDNN's kernels), and the sources in
tensorflow/core/kernels. The gradients of a convolution copy the image's patches to a matrix [shard, P, F], for as
many examples as fit the L3 cache together with the other matrices of the product; P pixels of the output and F
elements of a filter, D channels of the output:

    shard = ceil(L3 / item / (P F + F D + P D))        one example in the gradient of the image, if that is large

Where TensorFlow uses oneDNN's kernels (`TF_ENABLE_ONEDNN_OPTS`, by itself on some Intel CPUs) they need less than
that. On GPUs cuDNN chooses its workspace as it runs.
"""

import functools
import math
import pathlib
from collections.abc import Callable

import tensorflow as tf

_L3_SIZE = pathlib.Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_USUAL_L3_BYTES = 32 << 20
# Elements of an example's matrices from which the gradient of the image takes one example at a time.
_LARGE_EXAMPLE = 160_000
_POSITION_BYTES = 8


def workspace_bytes(operation: tf.Operation) -> int:
    """The workspace of an operation whose shapes are known; 0 for one that is not listed here."""
    if "GPU" in operation.device or operation.type not in _WORKSPACES:
        return 0
    return _WORKSPACES[operation.type](operation)


@functools.cache
def l3_bytes() -> int:
    """Size of the L3 cache, as Linux has it; 32 MiB if it does not say."""
    try:
        text = _L3_SIZE.read_text(encoding="ascii").strip()
        return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0)
    except (OSError, ValueError):
        return _USUAL_L3_BYTES


def patches_bytes(positions: int, filter_elements: int, depth: int, item_bytes: int, *, of_image: bool) -> int:
    """Bytes of the matrix of patches in a convolution's gradient.

    Args:
      positions: pixels of an output image.
      filter_elements: height * width * input channels of the filter.
      depth: output channels.
      item_bytes: bytes of an element.
      of_image: whether it is the gradient with respect to the image, not the filter.
    """
    patches = positions * filter_elements
    each = patches + filter_elements * depth + positions * depth
    shard = 1 if of_image and each >= _LARGE_EXAMPLE else math.ceil(l3_bytes() / item_bytes / each)
    return shard * patches * item_bytes


def _of_convolution(operation: tf.Operation, *, of_image: bool) -> int:
    image, gradient = (operation.outputs[0] if of_image else operation.inputs[0]), operation.inputs[2]
    filters = operation.inputs[1] if of_image else operation.outputs[0]
    if not (gradient.shape.is_fully_defined() and filters.shape.is_fully_defined()):
        return 0
    *window, inputs, depth = filters.shape.as_list()
    pixels = math.prod(gradient.shape[1:-1])
    return patches_bytes(pixels, math.prod(window) * inputs, depth, image.dtype.size, of_image=of_image)


def _of_max_pool_gradient(operation: tf.Operation) -> int:
    """The maxima, and where they are."""
    count = operation.inputs[1].shape.num_elements() or 0
    return count * (operation.inputs[1].dtype.size + _POSITION_BYTES)


_WORKSPACES: dict[str, Callable[[tf.Operation], int]] = {
    "Conv2DBackpropFilter": functools.partial(_of_convolution, of_image=False),
    "Conv2DBackpropInput": functools.partial(_of_convolution, of_image=True),
    "MaxPoolGrad": _of_max_pool_gradient,
}
