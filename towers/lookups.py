"""Which embedding tables of a model are read only by ids that the batch itself contains, and by which ids.

Such a table need not be in a tower's process: the rows that a batch needs are known before the model runs. To find
such tables, the model is traced once and its graph is searched for the uses of each table and for what its ids
depend on.
"""

import math
from collections.abc import Callable, Collection, Mapping

import keras
import tensorflow as tf

from towers.layers.kernels import LayerKernels
from towers.layers.shadowing import shadowed
from towers.layers.table_rows import layers_of_tables, row_ids
from towers.parameters.placement import canonical_names
from towers.task import Batch
from towers.tower import ModelVariables, run_model


class Lookups:
    """The tables of a model of which a tower can get rows only.

    Attributes:
      heights: number of rows of each such table, by its canonical name, in the model's order. The ids of all
        lookups in it come from the batch alone, and nothing else reads it: no other layer (tied weights), no loss
        (regularization), no ids that the model computes from its weights or draws at random.
    """

    def __init__(self, model: keras.Model, batch_spec: Batch, *, at_least_bytes: int = 0):
        """Args:
        model: a built template.
        batch_spec: the spec of a batch, dimension 0 open.
        at_least_bytes: size of the smallest table to consider.
        """
        variables = ModelVariables.of(model)
        names = canonical_names(variables.parameters)
        layers = layers_of_tables(model)
        candidates = {
            name: layers[variable.path]
            for name, variable in zip(names, variables.parameters, strict=True)
            if variable.path in layers and name == variable.path and _bytes(variable) >= at_least_bytes
        }
        self.heights: dict[str, int] = {}
        if candidates:
            graph = _TracedLookups(model, variables, candidates, batch_spec)
            self.heights = {name: candidates[name].input_dim for name in candidates if graph.is_free(name)}
            self._ids = graph.function_of(self.heights)

    def ids(self, batch: Batch) -> dict[str, tf.Tensor]:
        """The rows that a batch looks up in each table, int64 [n] by name, unordered and repeated. For graphs."""
        return self._ids(batch) if self.heights else {}


class _TracedLookups:
    """The graph of a model's forward pass, with the ids of its lookups."""

    def __init__(self, model, variables: ModelVariables, candidates: Mapping, batch_spec):
        found: dict[str, list] = {name: [] for name in candidates}
        self._ids: dict[str, tf.Tensor] = {}

        def forward(parameters, stand_ins, state, seed, batch):
            calls = [
                (layer, "call", _recorded(layer, stand_in, found[name]))
                for (name, layer), stand_in in zip(candidates.items(), stand_ins, strict=True)
            ]
            with shadowed(calls):
                run_model(model, variables.mapping(parameters, state, seed), (), batch, True, LayerKernels())
            # A lookup of a sparse or ragged tensor, or in a loop or condition, was recorded as None.
            self._ids.update({name: tf.concat(ids, 0) for name, ids in found.items() if ids and None not in ids})

        parameters = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables.parameters]
        state = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables.state]
        stand_ins = [
            tf.TensorSpec([None, layer.output_dim], layer.variable_dtype) for layer in candidates.values()
        ]
        seed = tf.TensorSpec([2], tf.int32)
        traced = tf.function(forward, autograph=False)
        concrete = traced.get_concrete_function(parameters, stand_ins, state, seed, batch_spec)
        self._graph = concrete.graph
        given = [tensor.op for tensor in concrete.inputs]
        before = len(parameters) + len(stand_ins) + len(state) + 1
        self._features = given[before : before + len(tf.nest.flatten(batch_spec.features))]
        paths = [variable.path for variable in variables.parameters]
        self._tables = {name: given[paths.index(name)] for name in candidates}

    def is_free(self, name: str) -> bool:
        """Whether the table is read by lookups of the batch's ids alone."""
        if name not in self._ids or any(output.consumers() for output in self._tables[name].outputs):
            return False
        others = self._operations_before(name) - set(self._features)
        return not any(operation.type == "Placeholder" or operation._is_stateful for operation in others)

    def _operations_before(self, name) -> set[tf.Operation]:
        """The operations that a table's ids are computed by; the last ones are the batch's features."""
        waiting, seen = [self._ids[name].op], set()
        while waiting:
            operation = waiting.pop()
            if operation not in seen:
                seen.add(operation)
                waiting += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
        return seen

    def function_of(self, names: Collection[str]) -> Callable[[Batch], dict[str, tf.Tensor]]:
        """A function for graphs from a batch to the ids of these tables."""
        used = {operation.name for name in names for operation in self._operations_before(name)}
        part = self._graph.as_graph_def()
        nodes = [node for node in part.node if node.name in used]
        del part.node[:]
        part.node.extend(nodes)
        wanted = [self._ids[name].name for name in names]

        def ids(batch):
            features = zip(self._features, tf.nest.flatten(batch.features), strict=True)
            given = {f"{operation.name}:0": tensor for operation, tensor in features if operation.name in used}
            found = tf.graph_util.import_graph_def(part, input_map=given, return_elements=wanted, name="ids")
            return dict(zip(names, found, strict=True))

        return ids


def _bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _recorded(layer, stand_in, found: list):
    """The layer's call, recording its ids and reading `stand_in`, not its table. Create it within the pass."""
    graph = tf.compat.v1.get_default_graph()

    def call(inputs):
        if tf.compat.v1.get_default_graph() is not graph:
            # Ids inside a loop's body or a condition's branch cannot be read outside of it.
            found.append(None)
            return type(layer).call(layer, inputs)
        if not isinstance(inputs, tf.Tensor):
            found.append(None)
            return layer.compute_output_spec(inputs)
        ids = row_ids(layer, inputs)
        found.append(tf.reshape(ids, [-1]))
        return tf.cast(tf.gather(stand_in, ids), layer.compute_dtype)

    return call
