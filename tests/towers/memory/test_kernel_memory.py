"""What kernels keep and need beside their outputs, with and without oneDNN; figures of traced steps."""

import contextlib

import pytest
import tensorflow as tf

from towers.memory import kernel_workspace, onednn_kernels
from towers.memory.graph_operations import HOST_MEMORY
from towers.memory.kernel_workspace import workspace_bytes
from towers.memory.lifetimes import peaks
from towers.memory.step_graph import StepGraph

MIB = 2**20


@contextlib.contextmanager
def kernels(monkeypatch, onednn):
    for module in (kernel_workspace, onednn_kernels):
        monkeypatch.setattr(module, "runs_onednn", lambda: onednn)
    yield


def pooled(images):
    with tf.GradientTape() as tape:
        tape.watch(images)
        total = tf.reduce_sum(tf.nn.max_pool2d(images, 2, 2, "SAME"))
    return tape.gradient(total, images)


@pytest.mark.parametrize(
    "onednn, kept, needed",
    # For each of [32, 16, 16, 64] pooled floats a byte is kept, or the gradient needs the maximum and its index.
    [(True, 0.5, 0), (False, 0, 2 + 4)],
)
def test_max_pooling(monkeypatch, onednn, kept, needed):
    with kernels(monkeypatch, onednn):
        spec = tf.TensorSpec([None, 32, 32, 64])
        graph = StepGraph(tf.function(pooled, autograph=False).get_concrete_function(spec))
        peak = peaks(graph.operations(32, one_memory=True))[HOST_MEMORY]
        # The images, the pooled images, their gradient and the result.
        assert peak.total_bytes == pytest.approx((8 + 2 + 2 + 8 + kept + needed) * MIB, abs=1000)


@pytest.mark.parametrize("equation, shapes, copied", [
    # The scores of attention: both inputs have the heads as an inner dimension.
    ("abcd,aecd->acbe", [(64, 64, 4, 16), (64, 64, 4, 16)], 2),
    # With the inputs exchanged, the result of 4 MiB is copied too.
    ("aecd,abcd->acbe", [(64, 64, 4, 16), (64, 64, 4, 16)], 6),
    # Scores times values: the values are copied, and the result from the order a c b d.
    ("acbe,aecd->abcd", [(64, 4, 64, 64), (64, 64, 4, 16)], 2),
    ("ab,bc->ac", [(256, 1024), (1024, 256)], 0),
])  # fmt: skip
def test_an_einsum_copies_what_has_another_order(equation, shapes, copied):
    with tf.Graph().as_default():
        product = tf.einsum(equation, *(tf.zeros(shape) for shape in shapes), name="product")
        operations = [one for one in tf.compat.v1.get_default_graph().get_operations() if one.type == "Einsum"]
        assert len(operations) == 1 and product.shape.is_fully_defined()
        assert workspace_bytes(operations[0]) == copied * MIB


def test_a_reduction_over_nothing_is_its_input():
    def step(batch):
        return tf.concat([tf.reduce_sum(tf.expand_dims(batch, 1), axis=1)] * 2, 0)

    graph = StepGraph(tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None, 16])))
    assert peaks(graph.operations(4, one_memory=True))[HOST_MEMORY].total_bytes == 3 * 4 * 64
