"""Bytes that TensorFlow's CPU kernels allocate besides their outputs.

Source: the allocations of traced steps (TensorFlow 2.21, two cores with and without oneDNN's kernels), and the
sources in tensorflow/core/kernels. The gradients of a convolution (conv_grad_filter_ops.h, conv_grad_input_ops.h)
copy the image's patches to a matrix [shard, P, F], for as many examples as fill 30 MiB together with the other
matrices of the product, whatever the CPU's cache and the batch; P pixels of the output and F elements of a filter,
D channels of the output:

    each  = P F + F D + P D
    shard = ceil(30 MiB / item / each)
    shard = 1    in the gradient of the image, if the batch is 1 or each / threads >= 256 KiB / item

oneDNN's kernels need none of this: see `towers.memory.onednn_kernels`. An Einsum is a product of matrices: it
copies inputs whose dimensions are in another order, and its result from another order. On GPUs cuDNN chooses its
workspace as it runs.
"""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

from towers.hardware.cpu_kernels import runs_onednn

# The sizes of the L3 and L2 cache that TensorFlow assumes.
_L3_BYTES, _L2_BYTES = 30 << 20, 256 << 10
_POSITION_BYTES = 8


def workspace_bytes(operation: tf.Operation, num_threads: int = 1) -> int:
    """The workspace of an operation whose shapes are known; 0 for one that is not listed here.

    Args:
      operation: an operation in a graph of known shapes.
      num_threads: number of threads that it may use.
    """
    if "GPU" in operation.device:
        return 0
    if operation.type == "Einsum":
        return _of_einsum(operation)
    if operation.type not in _OWN_KERNELS or runs_onednn():
        return 0
    return _OWN_KERNELS[operation.type](operation, num_threads)


def patches_bytes(
    positions: int, filter_elements: int, depth: int, item_bytes: int, *, examples: int = 0, num_threads: int = 1
) -> int:
    """Bytes of the matrix of patches in a convolution's gradient.

    Args:
      positions: pixels of an output image.
      filter_elements: height * width * input channels of the filter.
      depth: output channels.
      item_bytes: bytes of an element.
      examples: number of examples of the batch, for the image's gradient; 0 for the filter's gradient.
      num_threads: number of threads of an operation.
    """
    patches = positions * filter_elements
    each = patches + filter_elements * depth + positions * depth
    is_large = examples == 1 or each // num_threads >= _L2_BYTES // item_bytes
    shard = 1 if examples and is_large else math.ceil(_L3_BYTES / item_bytes / each)
    return shard * patches * item_bytes


def _of_convolution(operation: tf.Operation, num_threads: int, *, of_image: bool) -> int:
    image, gradient = (operation.outputs[0] if of_image else operation.inputs[0]), operation.inputs[2]
    filters = operation.inputs[1] if of_image else operation.outputs[0]
    if not (gradient.shape.is_fully_defined() and filters.shape.is_fully_defined()):
        return 0
    *window, inputs, depth = filters.shape.as_list()
    examples, *pixels, _ = gradient.shape.as_list()
    return patches_bytes(
        math.prod(pixels),
        math.prod(window) * inputs,
        depth,
        image.dtype.size,
        examples=examples if of_image else 0,
        num_threads=num_threads,
    )


def _of_max_pool_gradient(operation: tf.Operation, _num_threads: int) -> int:
    """Bytes of the maxima and of their positions."""
    count = operation.inputs[1].shape.num_elements() or 0
    return count * (operation.inputs[1].dtype.size + _POSITION_BYTES)


def _of_einsum(operation: tf.Operation) -> int:
    """Bytes of copies of inputs and result whose dimensions a matrix product needs in another order."""
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


_OWN_KERNELS: dict[str, Callable[[tf.Operation, int], int]] = {
    "Conv2DBackpropFilter": functools.partial(_of_convolution, of_image=False),
    "Conv2DBackpropInput": functools.partial(_of_convolution, of_image=True),
    "MaxPoolGrad": _of_max_pool_gradient,
}
