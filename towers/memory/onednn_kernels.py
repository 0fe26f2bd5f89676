"""Memory that oneDNN's kernels keep and need on CPUs, where TensorFlow runs them instead of its own.

Source: the allocations of traced steps (TensorFlow 2.21 on an AMD EPYC with AVX-512), and mkl_maxpooling_op.cc and
mkl_fused_batch_norm_op.cc in tensorflow/core/kernels/mkl. Gradients of convolutions and of max pooling need no
workspace from TensorFlow's allocator; but two kernels keep a tensor that their gradient reads:

    max pooling           a byte for each result: which of its inputs was the largest
    batch norm with ReLU  a bit for each result: whether it is above 0. TensorFlow takes the number of bytes that
                          oneDNN asks for as a number of elements, so it allocates four times as much in float32
"""

import math

import tensorflow as tf

from towers.hardware.cpu_kernels import runs_onednn

_NORM_WITH_RELU, _RESERVED = "_FusedBatchNormEx", 5
_BITS = 8


def positions_bytes(operation: tf.Operation) -> int:
    """Bytes that a max pooling keeps for its gradient besides its output; 0 for others."""
    if operation.type != "MaxPool" or not _is_onednn(operation):
        return 0
    readers = operation.outputs[0].consumers()
    return _elements(operation.outputs[0]) if any(one.type == "MaxPoolGrad" for one in readers) else 0


def reserved_bytes(operation: tf.Operation, position: int) -> int | None:
    """Bytes of an output whose shape only the kernel knows; None for other outputs."""
    if operation.type != _NORM_WITH_RELU or position != _RESERVED or not _is_onednn(operation):
        return None
    return math.ceil(_elements(operation.outputs[0]) / _BITS) * operation.outputs[position].dtype.size


def _is_onednn(operation: tf.Operation) -> bool:
    return "GPU" not in operation.device and runs_onednn()


def _elements(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() or 0
