"""A traced function as operations with their bytes: calls inlined, and every shape known.

`towers.engine.Engine` traces a step for batches of any length. Here the batch gets a length, and TensorFlow infers
all shapes that follow from it.
"""

import collections
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.framework import meta_graph, op_def_registry
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def
from tensorflow.python.grappler import tf_optimizer  # the one way to call the graph optimizer
from tensorflow.python.ops import handle_data_util  # the one way to give an argument the shape of a variable

from towers.layers.winograd_loops import loop_workspace_bytes
from towers.memory.buffer_reuse import reusable_inputs, shared_input
from towers.memory.kernel_workspace import workspace_bytes
from towers.memory.lifetimes import Operation, Output, peaks
from towers.memory.onednn_kernels import positions_bytes, reserved_bytes
from towers.tracing.compiled_functions import called_names
from towers.tracing.flat_graph import FlatGraph

# Kinds of tensors: the batch itself; what grows with it; what depends on its numbers alone; what does not.
BATCH, ACTIVATIONS, GRADIENTS, COPIES = "batch", "activations", "gradients", "copies"
HOST_MEMORY = "CPU:0"
# Before the names of what stands for the arguments; their own placeholders stay, and nothing reads them.
_ARGUMENT = "argument/"
# What grappler puts around the body of a call; when TensorFlow runs the step, towers do not wait for each other.
_OF_CALLS = ("input_control_node", "output_control_node")
_PRODUCTS = ("Conv", "MatMul", "Einsum")
_PRODUCT_COST = 10
_EACH_COST = 10_000
# Kernels that say that they are not expensive (`OpKernel::IsExpensive`); traces show none of them.
_CHEAP = {
    *("Const", "Identity", "IdentityN", "Reshape", "Shape", "ShapeN", "Rank", "Size", "ExpandDims", "Squeeze"),
    *("NoOp", "VarHandleOp", "Placeholder", "PlaceholderWithDefault", "StopGradient", "PreventGradient"),
    *("EnsureShape", "Bitcast", "BroadcastGradientArgs", "BroadcastArgs", "ConcatOffset"),
}
# Their tensors lie in the graph or in a variable, or the caller has them.
_WITHOUT_BUFFER = {"Const", "ReadVariableOp", "VarHandleOp", "Placeholder"}


class StepGraph:
    """A traced function whose batch has no length yet."""

    def __init__(self, concrete, *, kernel_threads: int = 1):
        """Args:
        concrete: a concrete function; the arguments with an open dimension 0 are its batch.
        kernel_threads: number of threads of an operation.
        """
        self._kernel_threads = kernel_threads
        self._graph_def = _inlined(concrete)
        self._arguments = {tensor.op.name: tensor for tensor in concrete.inputs}
        self._results = collections.Counter(tensor.name for tensor in concrete.outputs)
        # The last graph with known shapes, and bytes of bodies: a length is asked for again, for one memory.
        self._last: tuple[int, tf.Graph] | None = None
        self._kinds: dict[str, str] = {}
        self._bodies: dict[tuple, int] = {}

    @property
    def constant_bytes(self) -> int:
        """Bytes of the constants, which live as long as the graph."""
        values = [node.attr["value"].tensor for node in self._graph_def.node if node.op == "Const"]
        return sum(
            tf.as_dtype(value.dtype).size * (tf.TensorShape(value.tensor_shape).num_elements() or 0)
            for value in values
        )

    def operations(self, length: int, *, one_memory: bool = False) -> list[Operation]:
        """The operations for a batch of `length` examples.

        Args:
          length: number of examples.
          one_memory: whether all CPU devices are one memory; else each has its own, for what each holds.
        """
        if not self._kinds:
            self._kinds = self._kinds_at(max(length, _FEW))
        reading = _Reading(
            self._shaped(length),
            self._kinds,
            self._results,
            one_memory=one_memory,
            kernel_threads=self._kernel_threads,
            bodies=self._bodies,
        )
        return reading.operations

    def _kinds_at(self, length: int) -> dict[str, str]:
        """The kinds of tensors, from two lengths of a batch. The graph of `length` is the last one."""
        more, few = self._shaped(2 * length), self._shaped(length)
        return _kinds_of(
            few, more, [f"{_ARGUMENT}{name}" for name, like in self._arguments.items() if _is_open(like)]
        )

    def _shaped(self, length: int) -> tf.Graph:
        if self._last is None or self._last[0] != length:
            arguments = {name: (like, length) for name, like in self._arguments.items()}
            self._last = length, _shaped(self._graph_def, arguments)
        return self._last[1]


# Fewest examples of the batch that tells, beside one of twice as many, what grows with it: no part may be empty.
_FEW = 96


def _inlined(concrete) -> tf.compat.v1.GraphDef:
    """Its graph with the bodies of the functions that it calls, as TensorFlow runs it."""
    described, _ = meta_graph.export_scoped_meta_graph(
        graph=concrete.graph, graph_def=concrete.graph.as_graph_def(add_shapes=True)
    )
    kept = meta_graph_pb2.CollectionDef()
    kept.node_list.value.extend(tensor.name for tensor in (*concrete.inputs, *concrete.outputs))
    kept.node_list.value.extend(operation.name for operation in concrete.graph.control_outputs)
    described.collection_def["train_op"].CopyFrom(kept)
    in_functions = [node for function in described.graph_def.library.function for node in function.node_def]
    for node in (*described.graph_def.node, *in_functions):
        # Loops and branches stay one operation each, with a body.
        _drop(node, "_lower_using_switch_merge")
        # Some are to be where a node is that the optimizer replaces; the devices say enough.
        _drop(node, "_class")
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.optimizers.append("function")
    found = tf_optimizer.OptimizeGraph(config, described)
    for node in found.node:
        _drop(node, "_output_shapes")
    return _without_unused(found, kept.node_list.value)


def _without_unused(graph_def: tf.compat.v1.GraphDef, results: Sequence[str]) -> tf.compat.v1.GraphDef:
    """Without what has no effect and no result, as it runs: arguments that a call does not use, mostly."""
    has_effect = [node.name for node in graph_def.node if op_def_registry.get(node.op).is_stateful]
    found = FlatGraph(graph_def, (), results, has_effect).without_dead_nodes().graph_def
    for node in found.node:
        # Some are to be where an unused one was; all have a device by now.
        _drop(node, "_class")
    return found


def _drop(node, attribute: str) -> None:
    if attribute in node.attr:
        del node.attr[attribute]


def _shaped(graph_def, arguments: Mapping[str, tuple[tf.Tensor, int | None]]) -> tf.Graph:
    """The graph with all shapes that follow from its arguments: tensors like these, and the batch's length."""
    with tf.Graph().as_default() as graph:
        given = {f"{name}:0": _argument(name, *like) for name, like in arguments.items()}
        tf.graph_util.import_graph_def(graph_def, input_map=given, name="")
    return graph


def _is_open(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _argument(name: str, like: tf.Tensor, length: int | None) -> tf.Tensor:
    """A placeholder that stands for an argument: with the batch's length, or a variable of known shape."""
    shape = [length, *like.shape[1:]] if _is_open(like) else like.shape
    found = tf.compat.v1.placeholder(like.dtype, shape, name=f"{_ARGUMENT}{name}")
    handle_data_util.copy_handle_data(like, found)
    return found


def _kinds_of(few: tf.Graph, more: tf.Graph, batch: Sequence[str]) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for one, other in zip(few.get_operations(), more.get_operations(), strict=True):
        depends = one.name in batch or any(kinds.get(tensor.name) != COPIES for tensor in one.inputs)
        for tensor, larger in zip(one.outputs, other.outputs, strict=True):
            grows = _bytes(tensor) != _bytes(larger)
            kinds[tensor.name] = ACTIVATIONS if grows else GRADIENTS if depends else COPIES
            if one.name in batch:
                kinds[tensor.name] = BATCH
    return kinds


def _bytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; 0 for handles, strings and shapes that are not known."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return tensor.dtype.size * math.prod(tensor.shape)


def _device_name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def _is_cheap(operation: tf.Operation) -> bool:
    """Whether TensorFlow's threads run it at once. All kernels of GPUs are: they only start something there."""
    return operation.type in _CHEAP or "GPU" in operation.device


class _Reading:
    """A graph with known shapes as operations.

    Attributes:
      operations: those of the graph, and those that send tensors to other devices.
    """

    def __init__(
        self,
        graph: tf.Graph,
        kinds: Mapping[str, str],
        results: Mapping[str, int],
        *,
        one_memory: bool,
        kernel_threads: int,
        bodies: dict[tuple, int],
    ):
        self._kinds, self._results, self._one_memory = kinds, results, one_memory
        self._kernel_threads, self._bodies = kernel_threads, bodies
        self._library = {function.signature.name: function for function in graph.as_graph_def().library.function}
        self._indices: dict[str, int] = {}
        # By tensor and device where it is after it was sent there.
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}
        # Max poolings with a second output.
        self._with_positions: set[str] = set()
        # By device the operation after which those that wait for nothing else are ready.
        self._begins: dict[str, int] = {}
        self.operations: list[Operation] = []
        for operation in graph.get_operations():
            self._begin_on(_device_name(operation.device))
        for operation in graph.get_operations():
            self._add(operation)

    def _begin_on(self, device: str) -> None:
        if device not in self._begins:
            self._begins[device] = len(self.operations)
            self.operations.append(
                Operation(name=f"begin on {device}", outputs=(), cost=0, executor=device, is_cheap=True)
            )

    def _add(self, operation: tf.Operation) -> None:
        memory = self._memory_of(operation.device)
        reads = [self._read(tensor, operation) for tensor in operation.inputs]
        if operation.type == "MaxPoolGrad" and operation.inputs[1].op.name in self._with_positions:
            # Beside the result of the max pooling it reads where the largest inputs were.
            reads.append((self._indices[operation.inputs[1].op.name], 1))
        before = [one.name for one in operation.control_inputs if not any(name in one.name for name in _OF_CALLS)]
        after = [self._indices[name] for name in before if name in self._indices]
        if not reads and not after:
            after = [self._begins[_device_name(operation.device)]]
        outputs = [self._output(operation, k, memory) for k in range(len(operation.outputs))]
        if positions := positions_bytes(operation):
            outputs.append(Output(num_bytes=positions, kind=outputs[0].kind, memory=memory))
            self._with_positions.add(operation.name)
        self._indices[operation.name] = len(self.operations)
        self.operations.append(
            Operation(
                name=operation.name,
                reads=tuple(reads),
                after=tuple(after),
                outputs=tuple(outputs),
                workspace_bytes=workspace_bytes(operation, self._kernel_threads) + self._of_bodies(operation),
                cost=self._cost(operation, reads, outputs),
                memory=memory,
                executor=_device_name(operation.device),
                is_cheap=_is_cheap(operation),
            )
        )

    def _cost(self, operation: tf.Operation, reads: Sequence[tuple[int, int]], outputs: Sequence[Output]) -> float:
        """The bytes that it moves; matrix products take longer, views only what each operation takes."""
        if operation.type in _CHEAP:
            return _EACH_COST
        moved = [self.operations[source].outputs[position].num_bytes for source, position in reads]
        written = sum(output.num_bytes for output in outputs if output.shares is None)
        is_product = any(word in operation.type for word in _PRODUCTS)
        return _EACH_COST + (sum(moved) + written) * (_PRODUCT_COST if is_product else 1)

    def _memory_of(self, device: str) -> str:
        name = _device_name(device)
        return HOST_MEMORY if self._one_memory and name.startswith("CPU") else name

    def _read(self, tensor: tf.Tensor, operation: tf.Operation) -> tuple[int, int]:
        """Where an operation reads a tensor: on another device what was sent to it, in another memory a copy."""
        index, position = self._indices[tensor.op.name], tensor.value_index
        source, reader = self.operations[index].executor, _device_name(operation.device)
        if source == reader:
            return index, position
        if (tensor.name, reader) not in self._sent:
            received = self._received(tensor, reader)
            self._sent[tensor.name, reader] = (len(self.operations), 0)
            is_copied = not (source.startswith("CPU") and reader.startswith("CPU"))
            sent = Output(
                num_bytes=_bytes(tensor),
                kind=self._kinds.get(tensor.name, COPIES),
                memory=self._memory_of(operation.device) if is_copied else self.operations[index].memory,
                shares=None if is_copied else 0,
            )
            self.operations.append(
                Operation(
                    name=f"{tensor.op.name} to {reader}",
                    outputs=(sent,),
                    reads=((index, position),),
                    after=(received,),
                    cost=_EACH_COST,
                    memory=sent.memory,
                    executor=source,
                )
            )
        return self._sent[tensor.name, reader]

    def _received(self, tensor: tf.Tensor, reader: str) -> int:
        """Where a device begins to wait for a tensor: not before a thread has time for it."""
        self.operations.append(
            Operation(
                name=f"{tensor.op.name} at {reader}",
                outputs=(),
                after=(self._begins[reader],),
                cost=_EACH_COST,
                executor=reader,
            )
        )
        return len(self.operations) - 1

    def _output(self, operation: tf.Operation, position: int, memory: str) -> Output:
        tensor = operation.outputs[position]
        is_held = operation.type in _WITHOUT_BUFFER and self._kinds.get(tensor.name) != BATCH
        reserved = reserved_bytes(operation, position)
        num_bytes = _bytes(tensor) if reserved is None else reserved
        return Output(
            num_bytes=0 if is_held else num_bytes,
            kind=self._kinds.get(tensor.name, COPIES) if reserved is None else ACTIVATIONS,
            memory=memory,
            shares=shared_input(operation, position),
            may_reuse=tuple(reusable_inputs(operation, position)),
            is_kept=tensor.name in self._results or self._kinds.get(tensor.name) == BATCH,
        )

    def _of_bodies(self, operation: tf.Operation) -> int:
        """The most that a branch or the body of a loop needs: a function of the operation's last inputs."""
        if operation.node_def.attr["_XlaMustCompile"].b:
            # Compiled: others write their outputs only, as the trace of a step shows.
            shapes = [tensor.shape for tensor in operation.inputs]
            return loop_workspace_bytes(operation.get_attr("f").name, shapes) or 0
        names = called_names(operation.node_def)
        return max((self._of_body(self._library[name], operation) for name in names), default=0)

    def _of_body(self, function, operation: tf.Operation) -> int:
        # A variable's shape is that of what it refers to.
        likes = ((like.name if like.dtype == tf.resource else str(like.shape)) for like in operation.inputs)
        key = function.signature.name, *likes
        if key not in self._bodies:
            self._bodies[key] = self._peak_of_body(function, operation)
        return self._bodies[key]

    def _peak_of_body(self, function, operation: tf.Operation) -> int:
        graph_def, _ = function_def_to_graph_def(function)
        names = [argument.name for argument in function.signature.input_arg]
        graph_def.library.function.extend(self._library.values())
        inputs = list(operation.inputs)[-len(names) :] if names else []
        graph = _shaped(graph_def, dict(zip(names, ((like, None) for like in inputs), strict=True)))
        reading = _Reading(
            graph, {}, {}, one_memory=True, kernel_threads=self._kernel_threads, bodies=self._bodies
        )
        found = peaks(reading.operations)
        return sum(peak.total_bytes for peak in found.values())
