"""What a worker sends: the gradient as one vector; for an embedding, only the rows that the batch used."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies.servers.worker_engine import WorkerEngine
from strategies.synchronous import as_batches
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask
from towers.options import StepOptions
from towers.task import Batch, InputShard
from towers.updates.clipping import Clipping

WORDS, WIDTH, LENGTH = 50, 4, 3
# The rows of the embedding that the examples use.
USED = (7, 11, 49)


def task() -> TinyTask:
    draw = np.random.default_rng(0)
    words = draw.choice(USED, (6, LENGTH)).astype(np.int32)
    words[0] = USED

    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        hidden = layers.Flatten()(layers.Embedding(WORDS, WIDTH, name="words")(inputs))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(hidden))

    return TinyTask(build=build, examples=Batch(words, draw.integers(0, NUM_CLASSES, 6).astype(np.int32)))


def computed(num_towers: int = 1, *, wire: str = "float32", sends_sums: bool = False, **options):
    """The engine, the whole vector of parameters, and what the engine computed from the first batch."""
    keras.utils.set_random_seed(1)
    own, model = task(), task().build_model()
    data = as_batches(own.dataset("train", InputShard()))
    engine = WorkerEngine(
        own,
        model,
        cpus(num_towers),
        StepOptions(**options),
        rank=0,
        num_sharing=1,
        sends_sums=sends_sums,
        stand_in=None,
        wire_precision=wire,
    )
    vector = engine.layout.joined([variable.numpy() for variable in model.trainable_variables])
    return engine, vector, engine.compute(0, vector, np.zeros(0), [next(iter(data))])


def exact_gradient() -> np.ndarray:
    """Gradient of the mean loss, by a tape over Keras's own model."""
    keras.utils.set_random_seed(1)
    own, model = task(), task().build_model()
    with tf.GradientTape() as tape:
        logits = model(own.examples.features)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(own.examples.labels, logits)
        loss = tf.reduce_mean(losses)
    found = tape.gradient(loss, model.trainable_variables)
    return np.concatenate([np.ravel(tf.convert_to_tensor(gradient)) for gradient in found])


@pytest.mark.parametrize("num_towers", [1, 3])
def test_the_gradient_is_that_of_the_mean_loss(num_towers):
    _, _, found = computed(num_towers)
    np.testing.assert_allclose(found.gradient.whole(np.float32), exact_gradient(), rtol=1e-5, atol=1e-7)
    assert found.examples == 6
    assert found.norm == pytest.approx(np.linalg.norm(exact_gradient()), rel=1e-5)


@pytest.mark.parametrize("num_towers", [1, 3])
def test_an_embedding_sends_only_the_rows_that_were_used(num_towers):
    _, _, found = computed(num_towers)
    [rows] = found.gradient.rows
    assert sorted(rows.indices) == list(USED)
    assert len(found.gradient.dense) == LENGTH * WIDTH * NUM_CLASSES + NUM_CLASSES


def test_synchronous_workers_send_sums():
    _, _, found = computed(sends_sums=True)
    np.testing.assert_allclose(found.gradient.whole(np.float32), 6 * exact_gradient(), rtol=1e-5, atol=1e-6)
    assert found.weight == 6


def test_gradients_are_sent_in_the_wire_precision():
    _, _, found = computed(wire="bfloat16")
    assert {array.dtype for array in (found.gradient.dense, found.gradient.rows[0].values)} == {
        np.dtype(ml_dtypes.bfloat16)
    }
    np.testing.assert_allclose(found.gradient.whole(np.float32), exact_gradient(), rtol=2.0**-8, atol=1e-7)


def test_the_gradient_is_clipped_before_it_is_sent():
    _, _, found = computed(clipping=Clipping(global_norm=0.01))
    assert np.linalg.norm(found.gradient.whole(np.float32)) == pytest.approx(0.01, rel=1e-5)
    assert found.norm > 0.01, "the reported norm is before clipping"
