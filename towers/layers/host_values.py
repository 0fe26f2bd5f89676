"""In towers on GPUs, the host computes values that it reads itself: shapes, and seeds of random layers.

    shape of x  ->  product of some dimensions  ->  reshape
    host            the GPU's by default            reads the host's memory

TensorFlow has GPU kernels for some of these operations, and prefers them. So the host would wait until the GPU has
finished all work launched before: for each random layer, each Dense layer on three dimensions, and each gradient
of a mean.
"""

import tensorflow as tf

from towers.devices import HOST
from towers.hardware.gpu_kernels import made_on_host, read_on_host

# Their results are in the host's memory, whatever they read.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_CALLS = ("PartitionedCall", "If", "Case", "While")


def place_host_values(graph: tf.Graph) -> None:
    """Puts operations on the host if their results are read there, and if what they depend on is there.

    Args:
      graph: graph of a function that is being traced; the devices of some of its operations change.
    """
    operations = graph.get_operations()
    known: set[tf.Operation] = set()
    for operation in operations:
        if _is_known(operation, known):
            known.add(operation)
    for operation in reversed(operations):
        # Reversed: operations that read this one have their devices already.
        if operation in known and _is_read_from_gpu(operation):
            operation._set_device(HOST)
            if "_class" in operation.node_def.attr:
                # The attribute would place it with another operation.
                operation._clear_attr("_class")


def _is_known(operation: tf.Operation, known: set[tf.Operation]) -> bool:
    """Whether the host has what the operation reads."""
    if operation.type == "Placeholder":
        return operation.outputs[0].dtype == tf.int32  # the runtime has such arguments in the host's memory
    if operation._is_stateful or operation.type.removeprefix("Stateless") in _CALLS:
        return False
    return operation.type in _SHAPES or all(tensor.op in known for tensor in operation.inputs)


def _is_read_from_gpu(operation: tf.Operation) -> bool:
    if operation.type in ("Placeholder", *_SHAPES):
        return False
    on_host = made_on_host(operation)
    return any(
        not on_host[index] and any(_reads_on_host(reader, tensor) for reader in tensor.consumers())
        for index, tensor in enumerate(operation.outputs)
    )


def _reads_on_host(reader: tf.Operation, tensor: tf.Tensor) -> bool:
    if reader.device.endswith(HOST):
        return True
    return any(one is tensor and on_host for one, on_host in zip(reader.inputs, read_on_host(reader), strict=True))
