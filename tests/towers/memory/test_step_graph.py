"""A traced function's tensors: sizes for a batch of any length, kinds, and what calls and branches need."""

import pytest
import tensorflow as tf

from tests.towers.tiny_tasks import dense_task, trainer_of
from towers.memory.engine_memory import EngineMemory
from towers.memory.graph_operations import HOST_MEMORY
from towers.memory.kernel_workspace import patches_bytes
from towers.memory.lifetimes import peaks
from towers.memory.step_graph import StepGraph
from towers.memory.tensor_kinds import ACTIVATIONS, BATCH, COPIES, GRADIENTS
from towers.updates.rules import SGD, Momentum

WIDTH, FLOAT = 16, 4
# A dense network's parameters: 4 x 5, 5, 5 x 3, 3.
DENSE = 43 * FLOAT
RULES = {"sgd": SGD(), "momentum": Momentum()}


def graph_of(function, *others):
    specs = [tf.TensorSpec([None, WIDTH]), *others]
    return StepGraph(tf.function(function, autograph=False).get_concrete_function(*specs))


def peak_of(function, length, *others):
    return peaks(graph_of(function, *others).operations(length, one_memory=True))[HOST_MEMORY]


def test_sizes_follow_from_the_batch_and_calls_are_inlined():
    @tf.function(autograph=False)
    def called(x):
        return tf.concat([x, x], 1)

    found = peak_of(lambda batch: tf.reduce_sum(called(called(batch))), 10)
    row = WIDTH * FLOAT
    # The peak is the second concatenation: the batch, the concatenation's input and its output.
    assert found.kinds == {BATCH: 10 * row, ACTIVATIONS: 10 * 6 * row}


def test_kinds_tell_gradients_and_copies_of_parameters_from_activations():
    def step(batch, weights):
        halves = tf.cast(weights, tf.float16)
        product = tf.matmul(tf.cast(batch, tf.float16), halves)
        return tf.matmul(product, product, transpose_a=True)

    found = peak_of(step, 7, tf.TensorSpec([WIDTH, WIDTH]))
    assert found.operation == "MatMul"
    assert found.kinds == {BATCH: 7 * 64, ACTIVATIONS: 2 * 7 * 32, COPIES: WIDTH * WIDTH * 2}
    # The size of this product of two activations does not depend on the batch's length.
    gram = peak_of(lambda batch: tf.matmul(batch, batch, transpose_a=True), 2)
    assert gram.kinds == {BATCH: 2 * 64, GRADIENTS: WIDTH * WIDTH * FLOAT}


def test_a_branch_needs_its_largest_body():
    def step(batch):
        small, large = lambda: tf.reduce_sum(batch), lambda: tf.reduce_sum(tf.concat([batch] * 5, 0))
        return tf.cond(tf.reduce_all(batch > 0), small, large)

    found = peak_of(step, 10)
    assert found.total_bytes >= 10 * 6 * WIDTH * FLOAT
    assert found.total_bytes < 10 * 7 * WIDTH * FLOAT


def test_what_nothing_needs_is_not_computed():
    def step(batch):
        tf.concat([batch] * 50, 1)
        return tf.reduce_sum(tf.concat([batch] * 2, 1))

    # The batch, twice its size, and the sum.
    assert peak_of(step, 10).total_bytes == (1 + 2) * 10 * WIDTH * FLOAT + FLOAT


def test_a_tensor_that_is_broadcast_to_its_own_shape_is_not_copied():
    def step(batch, rows):
        twice = tf.concat([batch] * 2, 1)
        return tf.reduce_sum(tf.broadcast_to(twice, tf.broadcast_dynamic_shape(tf.shape(twice), tf.shape(rows))))

    for shape, num_copies in (([None, 2 * WIDTH], 0), ([3, 1, 2 * WIDTH], 3)):
        found = peak_of(step, 10, tf.TensorSpec(shape))
        assert found.kinds[ACTIVATIONS] == (1 + num_copies) * 10 * 2 * WIDTH * FLOAT


def test_a_device_begins_to_receive_before_a_tensor_is_sent():
    """A device's receives are ready with its first operations, and a busy thread leaves them for later."""

    def step(batch):
        with tf.device("/device:CPU:1"):
            twice = batch * 2
        return tf.reduce_sum(batch) + tf.reduce_sum(twice)

    operations = graph_of(step).operations(10)
    for reader in ("CPU:0", "CPU:1"):
        [sent] = [one for one in operations if one.name.endswith(f" to {reader}")]
        [received] = [operations[index] for index in sent.after]
        [begin] = [operations[index] for index in received.after]
        assert (sent.executor != reader, received.executor, begin.executor) == (True, reader, reader)
        assert begin.is_cheap and not (begin.reads or begin.after)
    assert [one.name for one in operations if not (one.reads or one.after)] == ["begin on CPU:0", "begin on CPU:1"]


def test_patches_of_a_convolution_fill_what_tensorflow_takes_for_a_cache():
    """Shapes from traced steps: [48, 1024, 144] in ResNet-20, [15, 256, 1600] in the classic network."""
    assert patches_bytes(1024, 144, 16, FLOAT) == 48 * 1024 * 144 * FLOAT
    assert patches_bytes(256, 1600, 64, FLOAT) == 15 * 256 * 1600 * FLOAT
    # The gradient of the image has patches of one large example at a time, but of several small ones.
    assert patches_bytes(1024, 144, 16, FLOAT, examples=32, num_threads=2) == 1024 * 144 * FLOAT
    assert patches_bytes(64, 576, 64, FLOAT, examples=32, num_threads=2) == 102 * 64 * 576 * FLOAT
    assert patches_bytes(64, 576, 64, FLOAT, examples=32) == 64 * 576 * FLOAT
    assert patches_bytes(64, 576, 64, FLOAT, examples=1, num_threads=2) == 64 * 576 * FLOAT


@pytest.mark.full
def test_an_engine_holds_its_variables_and_more_for_longer_batches():
    memory = {name: EngineMemory(trainer_of(dense_task(8), rule=rule).engine) for name, rule in RULES.items()}
    found = {name: one.in_all(64) for name, one in memory.items()}
    assert {one.parameters_bytes for one in found.values()} == {DENSE}
    assert [found[name].optimizer_bytes for name in RULES] == [0, DENSE]
    # The Keras model keeps its first values, which take as many bytes.
    assert memory["sgd"].template_bytes == DENSE <= found["sgd"].buffers_bytes
    few, more = memory["momentum"].in_all(640), memory["momentum"].in_all(1280)
    assert 1.9 < more.activations_bytes / few.activations_bytes < 2.1
    assert more.parameters_bytes == few.parameters_bytes and few.gradients_bytes > 0
