"""Which of TensorFlow's CPU kernels write an output into an input's buffer.

Source: the kernels' calls of `forward_input_or_allocate_output` and `set_output` in tensorflow/core/kernels of
TensorFlow 2.21, compared with the addresses that a traced step reports. An operation that is not listed here gets
buffers of its own, so an omission predicts too much memory.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

# The output is the input, perhaps with another shape.
_SHARED = {
    *("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "EnsureShape"),
    *("CheckNumerics", "PlaceholderWithDefault", "Bitcast"),
}
_BINARY = {
    *("Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "MulNoNan", "FloorDiv", "FloorMod", "Maximum"),
    *("Minimum", "Pow", "SquaredDifference", "TanhGrad", "SigmoidGrad", "RsqrtGrad", "SqrtGrad", "InvGrad"),
    *("ReciprocalGrad", "LogicalAnd", "LogicalOr"),
}
_UNARY = {
    *("Neg", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Square", "Tanh", "Sigmoid", "Erf", "Erfc", "Abs"),
    *("Sign", "Floor", "Ceil", "Round", "Rint", "Inv", "Reciprocal", "Sin", "Cos", "LogicalNot", "Relu", "Relu6"),
    *("LeakyRelu", "Elu", "Selu", "Softplus", "Softsign", "Softmax", "LogSoftmax", "BiasAdd", "ZerosLike"),
    *("OnesLike", "ClipByValue"),
}
_GRADIENTS = {"ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SoftplusGrad", "SoftsignGrad"}
_REDUCTIONS = {"Sum", "Mean", "Max", "Min", "Prod", "Any", "All"}
_ALIGNMENT_BYTES = 64


def shared_input(operation: tf.Operation, position: int) -> int | None:
    """Index of the input whose buffer output `position` always is; None if there is none."""
    if operation.type in _SHARED:
        return 0
    if operation.type == "IdentityN":
        return position
    if operation.type in ("StridedSlice", "Slice"):
        return 0 if _is_run_of_rows(operation.inputs[0].shape, operation.outputs[0].shape) else None
    if operation.type in ("Pad", "BroadcastTo"):
        whole, filled = operation.inputs[0].shape, operation.outputs[0].shape
        return 0 if filled.is_fully_defined() and filled == whole else None
    if operation.type == "SplitV" and tf.get_static_value(operation.inputs[2]) == 0:
        return 0 if _begins_aligned(operation.inputs[0], operation.outputs[:position]) else None
    if operation.type in _REDUCTIONS:
        # A reduction over no dimension, or over one of size 1.
        whole, reduced = operation.inputs[0].shape, operation.outputs[0].shape
        is_same = reduced.is_fully_defined() and whole.num_elements() == reduced.num_elements()
        return 0 if is_same else None
    if operation.type in ("ConcatV2", "AddN") and operation.get_attr("N") == 1:
        return 0
    return None


def reusable_inputs(operation: tf.Operation, position: int) -> Sequence[int]:
    """Indices of the inputs whose buffer output `position` takes over if nothing else still reads it."""
    kind = operation.type
    if kind == "SparseSoftmaxCrossEntropyWithLogits" or kind == "SoftmaxCrossEntropyWithLogits":
        return (0,) if position == 1 else ()
    if position:
        return ()
    if kind in _BINARY:
        return (0, 1)
    if kind == "AddN":
        return range(len(operation.inputs))
    if kind in ("Select", "SelectV2"):
        return (1, 2)
    return (0,) if kind in _UNARY or kind in _GRADIENTS else ()


def _is_run_of_rows(whole: tf.TensorShape, part: tf.TensorShape) -> bool:
    """Whether a slice cuts only the first dimension; it is then a view if it begins at an aligned byte."""
    if whole.rank is None or whole.rank != part.rank or not whole.rank:
        return False
    return whole[1:].is_fully_defined() and whole[1:] == part[1:]


def _begins_aligned(whole: tf.Tensor, before: Sequence[tf.Tensor]) -> bool:
    if not whole.shape.is_fully_defined():
        return False
    rows = sum(tensor.shape[0] or 0 for tensor in before)
    return rows * math.prod(whole.shape[1:]) * whole.dtype.size % _ALIGNMENT_BYTES == 0
