"""Whether XLA compiles the step where that was left open: on one GPU, if it can compile all of the tower.

Images/s on an H100 (batch 1,024, bfloat16, TensorFlow 2.21):

                 without XLA    tower compiled    Keras fit, which compiles too    PyTorch 2.11
    ResNet-20    30,100         73,200            107,000
    cifar_fast   46,300         124,600                                            147,700

Most of the difference is cuDNN's batch norm over few channels: its backward pass took 26 of 52 ms of ResNet-20.
The first step takes 29 s instead of 12. Several GPUs were not measured, so there XLA compiles only if asked to.
"""

import keras
import tensorflow as tf
from tensorflow.python.framework import kernels  # has no public name

from towers.devices import Devices
from towers.options import StepOptions
from towers.task import Batch, Task
from towers.tower import EvaluationFunction, ModelVariables

# Calls, arguments and results of functions, which XLA sees through.
_STRUCTURE = ("Placeholder", "PartitionedCall", "StatefulPartitionedCall", "_Arg", "_Retval", "_EagerConst")
# XLA compiles them, but not what follows, for results of unknown lengths.
_OF_UNKNOWN_LENGTH = ("Where", "Unique", "UniqueV2", "DynamicPartition")
_XLA_DEVICE = "XLA_GPU_JIT"


def suits_xla(task: Task, model: keras.Model, devices: Devices, options: StepOptions, batch_spec: Batch) -> bool:
    """Whether to compile, for options that leave it open.

    Args:
      task, model: what is trained; the model is built.
      devices: of the towers.
      options: how a step computes.
      batch_spec: of a batch as the towers get it, dimension 0 open.
    """
    one_gpu = devices.num_towers == 1 and not devices.on_cpu and not devices.groups
    # Not all operations that XLA compiles give the same bits each time; recomputation is not for XLA.
    is_usual = not devices.deterministic and devices.zero != 3 and options.recompute == "none"
    # XLA draws other numbers from a seed, so dropout would differ from that of other modes.
    if not one_gpu or not is_usual or ModelVariables.of(model).seeds:
        return False
    return _works_on(devices.towers[0]) and _can_compile(task, model, batch_spec)


def _works_on(device: str) -> bool:
    """Whether XLA compiles for a device. For GPUs it needs files of CUDA's compiler, which drivers don't bring."""
    try:
        with tf.device(device):
            # Not of a constant, which the host would compute.
            tf.function(tf.exp, jit_compile=True, autograph=False)(tf.zeros([8]))
    except tf.errors.OpError:
        return False
    return True


def _can_compile(task: Task, model: keras.Model, batch_spec: Batch) -> bool:
    """Whether XLA has kernels for a forward pass of the task, loss and metrics, at shapes that stay the same."""
    shapes = [spec.shape for spec in tf.nest.flatten(batch_spec)]
    if any(shape.rank is None or None in shape[1:] for shape in shapes):
        return False
    if not all(layer.supports_jit for layer in model._flatten_layers()):
        return False
    return not _unsupported(_forward_graph(task, model, batch_spec))


def _unsupported(graph: tf.Graph) -> set[str]:
    """Kinds of operations in a graph, and in the functions that it calls, that keep XLA from compiling it.

    XLA registers its kernels when it compiles something, as in `_works_on`.
    """
    described = graph.as_graph_def()
    kinds = {node.op for node in described.node}
    functions = {function.signature.name for function in described.library.function}
    kinds |= {node.op for function in described.library.function for node in function.node_def}
    return {kind for kind in kinds - functions - {*_STRUCTURE} if not _has_kernel(kind)}


def _forward_graph(task: Task, model: keras.Model, batch_spec: Batch) -> tf.Graph:
    variables = ModelVariables.of(model)

    def forward(batch):
        function = EvaluationFunction(task, model, traced=lambda function: function)
        values = ([variable.value for variable in of_kind] for of_kind in (variables.parameters, variables.state))
        return function(*values, batch, tf.constant(1.0))

    return tf.function(forward, autograph=False).get_concrete_function(batch_spec).graph


def _has_kernel(kind: str) -> bool:
    found = kernels.get_registered_kernels_for_op(kind).kernel
    return kind not in _OF_UNKNOWN_LENGTH and any(kernel.device_type == _XLA_DEVICE for kernel in found)
