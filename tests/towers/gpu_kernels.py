"""Which GPU kernels TensorFlow has for the operations of a graph: read from its registry, without a GPU."""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.framework import kernels

from towers.hardware.gpu_kernels import made_on_host, read_on_host

# Operations that the runtime computes, or that compute nothing.
_WITHOUT_KERNEL = ("Placeholder", "NoOp", "PartitionedCall", "StatefulPartitionedCall")


def on_host_in(graph: tf.Graph) -> list[str]:
    """The operations of a graph that a GPU would leave to the host: without a kernel, or with data in host memory.

    Shapes, int32 vectors and scalars, are always the host's, and are not counted.
    """
    return [
        f"{operation.name}: {operation.type}" for operation in graph.get_operations() if _is_on_host(operation)
    ]


def _is_on_host(operation: tf.Operation) -> bool:
    if operation.type in _WITHOUT_KERNEL or all(map(_is_shape, operation.outputs)):
        return False
    found = [kernel for kernel in _gpu_kernels(operation.type) if _fits(kernel, operation)]
    if not found:
        return True
    names = [argument.name for argument in operation.op_def.output_arg]
    return any(name in kernel.host_memory_arg for kernel in found[:1] for name in names)


def _is_shape(tensor: tf.Tensor) -> bool:
    return tensor.dtype == tf.int32 and tensor.shape.rank is not None and tensor.shape.rank <= 1


def _gpu_kernels(kind: str) -> list[kernel_def_pb2.KernelDef]:
    found = kernels.get_registered_kernels_for_op(kind).kernel
    return [kernel for kernel in found if kernel.device_type in ("GPU", "DEFAULT")]


def _fits(kernel: kernel_def_pb2.KernelDef, operation: tf.Operation) -> bool:
    return all(
        operation.get_attr(constraint.name).as_datatype_enum in constraint.allowed_values.list.type
        for constraint in kernel.constraint
    )


def waits_in(graph: tf.Graph, results: Sequence[tf.Tensor]) -> list[str]:
    """Where the host would read, and so wait for, what a GPU computed, as 'type > type'.

    Args:
      graph: a graph that is on a GPU, except operations on the host's device.
      results: operations that these don't need are left out.
    """
    needed, waiting = set(), [tensor.op for tensor in results]
    while waiting:
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return [
        f"{tensor.op.type} > {operation.type}: {tensor.name} > {operation.name}"
        for operation in graph.get_operations()
        if operation in needed
        for tensor, on_host in zip(operation.inputs, _reads(operation), strict=True)
        if on_host and not _is_made_on_host(tensor)
    ]


def _reads(operation: tf.Operation) -> list[bool]:
    return [True] * len(operation.inputs) if ":CPU:" in operation.device else read_on_host(operation)


def _is_made_on_host(tensor: tf.Tensor) -> bool:
    return ":CPU:" in tensor.op.device or made_on_host(tensor.op)[tensor.value_index]
