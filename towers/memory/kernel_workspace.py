"""What TensorFlow's CPU kernels allocate besides their outputs, in bytes.

Source: the allocations of traced steps (TensorFlow 2.21, two cores with and without oneDNN's kernels), and the
sources in tensorflow/core/kernels. The gradients of a convolution copy the image's patches to a matrix
[shard, P, F], for as many examples as fit the L3 cache together with the other matrices of the product; P pixels
of the output and F elements of a filter, D channels of the output:

    shard = ceil(L3 / item / (P F + F D + P D))        one example in the gradient of the image, if that is large

oneDNN's kernels need none of this: see `towers.memory.onednn_kernels`. An Einsum is a product of matrices: it
copies inputs whose dimensions are in another order, and its result from another order. On GPUs cuDNN chooses its
workspace as it runs.
"""

import functools
import math
import pathlib
from collections.abc import Callable

import tensorflow as tf

from towers.cpu_kernels import runs_onednn

_L3_SIZE = pathlib.Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_USUAL_L3_BYTES = 32 << 20
# Elements of an example's matrices from which the gradient of the image takes one example at a time.
_LARGE_EXAMPLE = 160_000
_POSITION_BYTES = 8


def workspace_bytes(operation: tf.Operation) -> int:
    """The workspace of an operation whose shapes are known; 0 for one that is not listed here."""
    if "GPU" in operation.device:
        return 0
    if operation.type == "Einsum":
        return _of_einsum(operation)
    if operation.type not in _OWN_KERNELS or runs_onednn():
        return 0
    return _OWN_KERNELS[operation.type](operation)


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


def _of_einsum(operation: tf.Operation) -> int:
    """Copies of inputs and of the result whose dimensions a product of matrices has in another order."""
    equation = operation.get_attr("equation").decode()
    inputs, _, result = equation.partition("->")
    first, _, second = inputs.partition(",")
    tensors = [*operation.inputs, operation.outputs[0]]
    if not second or "." in equation or not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return 0
    batch = [label for label in first if label in second and label in result]
    contracted = [label for label in first if label in second and label not in result]
    free = [[label for label in labels if label not in batch + contracted] for labels in (first, second)]
    orders = [
        *({"".join(batch + own + contracted), "".join(batch + contracted + own)} for own in free),
        {"".join(batch + free[0] + free[1])},
    ]
    return sum(
        tensor.dtype.size * tensor.shape.num_elements()
        for tensor, labels, order in zip(tensors, (first, second, result), orders, strict=True)
        if labels not in order
    )


_OWN_KERNELS: dict[str, Callable[[tf.Operation], int]] = {
    "Conv2DBackpropFilter": functools.partial(_of_convolution, of_image=False),
    "Conv2DBackpropInput": functools.partial(_of_convolution, of_image=True),
    "MaxPoolGrad": _of_max_pool_gradient,
}
