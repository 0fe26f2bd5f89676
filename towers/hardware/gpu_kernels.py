"""Which tensors GPU kernels keep in the host's memory, from TensorFlow's registry, which needs no GPU."""

import functools
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.framework import kernels  # has no public name

# Arguments of functions, and calls: the runtime keeps some of their dtypes in the host's memory.
_CALLS = (
    *("Placeholder", "PartitionedCall", "StatefulPartitionedCall"),
    *("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"),
)
_DTYPES_OF_HOST = (tf.int32, tf.string, tf.resource)


def read_on_host(operation: tf.Operation) -> list[bool]:
    """For each input, whether the GPU kernel reads it in the host's memory; always True without a GPU kernel."""
    return _in_host_memory(operation, operation.op_def.input_arg, operation.inputs)


def made_on_host(operation: tf.Operation) -> list[bool]:
    """For each output, whether the GPU kernel writes it to the host's memory; always True without a GPU kernel."""
    return _in_host_memory(operation, operation.op_def.output_arg, operation.outputs)


def _in_host_memory(operation: tf.Operation, arguments, tensors: Sequence[tf.Tensor]) -> list[bool]:
    if operation.type in _CALLS:
        return [tensor.dtype in _DTYPES_OF_HOST for tensor in tensors]
    kernel = _kernel_of(operation)
    if kernel is None:
        return [True] * len(tensors)
    names = [argument.name for argument in arguments for _ in range(_length(argument, operation))]
    return [name in kernel.host_memory_arg for name in names]


def _kernel_of(operation: tf.Operation) -> kernel_def_pb2.KernelDef | None:
    return next((kernel for kernel in _kernels(operation.type) if _fits(kernel, operation)), None)


@functools.cache
def _kernels(kind: str) -> list[kernel_def_pb2.KernelDef]:
    """The kernels that a GPU may use, in TensorFlow's order of preference."""
    found = kernels.get_registered_kernels_for_op(kind).kernel
    usable = [kernel for kernel in found if kernel.device_type in ("GPU", "DEFAULT")]
    return sorted(usable, key=lambda kernel: (-kernel.priority, kernel.device_type == "DEFAULT"))


def _fits(kernel: kernel_def_pb2.KernelDef, operation: tf.Operation) -> bool:
    return all(
        operation.get_attr(constraint.name).as_datatype_enum in constraint.allowed_values.list.type
        for constraint in kernel.constraint
    )


def _length(argument, operation: tf.Operation) -> int:
    """The number of tensors of an argument."""
    if argument.number_attr:
        return operation.get_attr(argument.number_attr)
    return len(operation.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1
