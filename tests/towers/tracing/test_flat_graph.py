"""Flat graphs: which Identity nodes are removed; which functions the graphs know."""

import numpy as np
import tensorflow as tf

from towers.tracing import flat_graph
from towers.tracing.traced_once import optimized_if_needed


def test_identity_nodes_at_the_end_are_removed():
    """All but those that are kept by name, that other nodes use, or that forward an argument."""

    @tf.function(autograph=False)
    def function(x):
        product = x * 2.0
        used = tf.identity(product, name="used")
        return tf.identity(product, name="at_the_end"), tf.identity(x, name="argument"), used + 1.0

    concrete = function.get_concrete_function(tf.TensorSpec([2], tf.float32))
    graph_def = concrete.graph.as_graph_def()
    names = [tensor.name for tensor in concrete.outputs]
    found = flat_graph._bypass_identities(graph_def, names, kept=[names[2].split(":")[0]])
    left = {node.name for node in graph_def.node}
    assert found[0] == "mul:0" and found[2] == "add:0"
    assert {"used", "mul", "add"} <= left and "at_the_end" not in left and names[2].split(":")[0] in left
    given = tf.constant([1.0, 3.0])
    for ours, theirs in zip(optimized_if_needed(concrete)(given), concrete(given), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_loop_can_be_in_a_wrapped_function():
    """As a recurrent layer in a step of ParameterServerStrategy: all functions of its graph become known."""

    @tf.function(autograph=False)
    def function(x):
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.identity(y) * 2.0), [tf.constant(0), x])[
            1
        ]

    spec = tf.TensorSpec([], tf.float32)
    flat = flat_graph.flat_graph(function.get_concrete_function(spec))
    assert flat.graph_def.library.function
    (found,) = tf.compat.v1.wrap_function(flat.imported, [spec])(tf.constant(2.0))
    assert float(found) == 16.0
