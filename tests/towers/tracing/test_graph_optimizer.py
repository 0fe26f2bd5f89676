"""What TensorFlow's graph optimizer does to a tower's graph, and what it is prevented from doing."""

import os

import pytest
import tensorflow as tf
from keras import layers

from tests.towers.tiny_tasks import stacked
from towers.hardware.cpu_instructions import AVX512, ONEDNN_LIMIT, cpu_instructions
from towers.hardware.cpu_kernels import runs_onednn
from towers.layers.kernels import LayerKernels
from towers.precision import layer_precision
from towers.task import Batch
from towers.tracing import graph_optimizer
from towers.tracing.flat_graph import flat_graph
from towers.tracing.traced_once import optimized_if_needed

CPU = "/device:CPU:0"


def test_the_optimized_graph_is_smaller():
    def wasteful(batch):
        ones = tf.ones([4, 4])
        return tf.reduce_sum(tf.matmul(ones, ones)) + tf.reduce_sum(batch.features) + tf.reduce_sum(batch.features)

    spec = Batch(tf.TensorSpec([None, 3]), tf.TensorSpec([None]))
    concrete = tf.function(wasteful, autograph=False).get_concrete_function(spec)
    assert len(flat_graph(concrete).graph_def.node) < len(concrete.graph.as_graph_def().node)
    assert optimized_if_needed(concrete)(Batch(tf.ones([2, 3]), tf.ones([2]))).numpy() == 64 + 12


def test_a_lookup_table_of_the_program_causes_no_warning(caplog):
    tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["word"], [1]), -1)
    concrete = tf.function(tf.square, autograph=False).get_concrete_function(tf.TensorSpec([None]))
    tf.get_logger().addHandler(caplog.handler)
    try:
        graph_optimizer.optimized_graph(concrete, concrete.graph.as_graph_def())
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    assert not caplog.records


@pytest.mark.skipif(
    AVX512 not in cpu_instructions(os.environ.get(ONEDNN_LIMIT, "")) or not runs_onednn(),
    reason="only oneDNN with AVX-512 joins bfloat16 operations",
)
@pytest.mark.parametrize(
    "device, use_bias, is_joined", [("", False, True), ("", True, True), (CPU, False, True), (CPU, True, False)]
)
def test_which_batch_norms_are_joined_with_their_relu(monkeypatch, device, use_bias, is_joined):
    """Joined ones are twice as fast. A convolution on a named device would be joined with its bias, and fail."""
    monkeypatch.setattr(graph_optimizer, "must_optimize", lambda concrete: True)
    kernels = LayerKernels(exact_bias_gradients=True)
    with layer_precision("bfloat16"):
        convolution = layers.Conv2D(4, 3, use_bias=use_bias)
        model = stacked((6, 6, 4), convolution, layers.BatchNormalization(), layers.ReLU())

    def outputs(images):
        with tf.device(device), kernels.in_place(model):
            return model(images, training=True)

    concrete = tf.function(outputs, autograph=False).get_concrete_function(tf.TensorSpec([None, 6, 6, 4]))
    types = [node.op for node in flat_graph(concrete).graph_def.node]
    assert ("_FusedBatchNormEx" in types) == is_joined
    assert optimized_if_needed(concrete)(tf.ones([2, 6, 6, 4])).dtype == tf.bfloat16


def test_nothing_is_joined_for_a_worker_s_gpu(monkeypatch):
    """A GPU has no kernel for a joined float32 batch norm; the chief optimizes for all workers, on its CPU."""
    monkeypatch.setattr(graph_optimizer, "must_optimize", lambda concrete: True)
    model = stacked((6, 6, 4), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU())
    cpus = tf.config.list_logical_devices("CPU")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: [object()] if kind == "GPU" else cpus)

    def outputs(images):
        with LayerKernels().in_place(model):
            return model(images, training=True)

    concrete = tf.function(outputs, autograph=False).get_concrete_function(tf.TensorSpec([None, 6, 6, 4]))
    assert not [node.op for node in flat_graph(concrete).graph_def.node if node.op.startswith("_Fused")]
