"""A graph of known shapes as operations: what each reads and writes, its cost, and which memory it uses."""

from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

from towers.layers.convolutions.winograd_loops import loop_workspace_bytes
from towers.memory.buffer_reuse import reusable_inputs, shared_input
from towers.memory.kernel_workspace import workspace_bytes
from towers.memory.lifetimes import Operation, Output, peaks
from towers.memory.onednn_kernels import positions_bytes, reserved_bytes
from towers.memory.shaped_graph import shaped
from towers.memory.tensor_kinds import ACTIVATIONS, BATCH, COPIES, tensor_bytes
from towers.tracing.compiled_functions import called_names

HOST_MEMORY = "CPU:0"
# Nodes that grappler puts around the body of a call. Control inputs from them are ignored: in a real step towers
# do not wait for each other.
_OF_CALLS = ("input_control_node", "output_control_node")
_PRODUCTS = ("Conv", "MatMul", "Einsum")
_PRODUCT_COST = 10
_EACH_COST = 10_000
# Kernels that TensorFlow considers cheap (`OpKernel::IsExpensive` is false); traces show none of them.
_CHEAP = {
    *("Const", "Identity", "IdentityN", "Reshape", "Shape", "ShapeN", "Rank", "Size", "ExpandDims", "Squeeze"),
    *("NoOp", "VarHandleOp", "Placeholder", "PlaceholderWithDefault", "StopGradient", "PreventGradient"),
    *("EnsureShape", "Bitcast", "BroadcastGradientArgs", "BroadcastArgs", "ConcatOffset"),
}
# Operations whose tensors lie in the graph or in a variable, or belong to the caller.
_WITHOUT_BUFFER = {"Const", "ReadVariableOp", "VarHandleOp", "Placeholder"}


def _device_name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def _is_cheap(operation: tf.Operation) -> bool:
    """Whether TensorFlow's threads run it at once. All GPU operations are cheap: they only start kernels."""
    return operation.type in _CHEAP or "GPU" in operation.device


class GraphOperations:
    """The operations of a graph.

    Attributes:
      operations: operations of the graph, and operations that send tensors to other devices.
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
        """Args:
        graph: a graph whose shapes are known.
        kinds: kinds of its tensors, by name, as from `tensor_kinds.kinds_of`; the other tensors are copies.
        results: names of the tensors that are kept to the end.
        one_memory: whether all CPU devices are one memory; else each has its own.
        kernel_threads: number of threads of an operation.
        bodies: cache of the bytes of the bodies of loops and branches; new ones are added.
        """
        self._kinds, self._results, self._one_memory = kinds, results, one_memory
        self._kernel_threads, self._bodies = kernel_threads, bodies
        self._library = {function.signature.name: function for function in graph.as_graph_def().library.function}
        self._indices: dict[str, int] = {}
        # By tensor and device: the tensor's copy on a device that it was sent to.
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}
        # Max poolings with a second output.
        self._with_positions: set[str] = set()
        # By device: the operation after which operations without other inputs are ready.
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
            # Beside the max pooling's result it reads the positions of the largest inputs.
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
        """The bytes that it moves; more for matrix products; for views only the fixed cost of an operation."""
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
        """The (operation, output) that an operation reads for a tensor: what was sent to its device, or a copy."""
        index, position = self._indices[tensor.op.name], tensor.value_index
        source, reader = self.operations[index].executor, _device_name(operation.device)
        if source == reader:
            return index, position
        if (tensor.name, reader) not in self._sent:
            received = self._received(tensor, reader)
            self._sent[tensor.name, reader] = (len(self.operations), 0)
            is_copied = not (source.startswith("CPU") and reader.startswith("CPU"))
            sent = Output(
                num_bytes=tensor_bytes(tensor),
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
        """The operation with which a device starts to receive a tensor, once a thread has time for it."""
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
        num_bytes = tensor_bytes(tensor) if reserved is None else reserved
        return Output(
            num_bytes=0 if is_held else num_bytes,
            kind=self._kinds.get(tensor.name, COPIES) if reserved is None else ACTIVATIONS,
            memory=memory,
            shares=shared_input(operation, position),
            may_reuse=tuple(reusable_inputs(operation, position)),
            is_kept=tensor.name in self._results or self._kinds.get(tensor.name) == BATCH,
        )

    def _of_bodies(self, operation: tf.Operation) -> int:
        """The peak of the operation's branches or loop body, functions of its last inputs."""
        if operation.node_def.attr["_XlaMustCompile"].b:
            # Compiled by XLA; other compiled functions allocate only their outputs, as the trace of a step shows.
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
        graph = shaped(graph_def, dict(zip(names, ((like, None) for like in inputs), strict=True)))
        read = GraphOperations(
            graph, {}, {}, one_memory=True, kernel_threads=self._kernel_threads, bodies=self._bodies
        )
        found = peaks(read.operations)
        return sum(peak.total_bytes for peak in found.values())
