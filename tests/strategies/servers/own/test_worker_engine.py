"""What a worker sends: the gradient as one vector; for an embedding, only the rows that the batch used."""

import types

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies.data_checks.batches import as_batches
from strategies.servers.own import roles
from strategies.servers.own.worker_engine import Computed, WorkerEngine
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask
from tests.towers.user_errors import refused
from towers.lookups import Lookups
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
    """The engine, and what it computed from the first batch."""
    keras.utils.set_random_seed(1)
    engine, compute = engine_of(task(), num_towers, wire=wire, sends_sums=sends_sums, **options)
    return engine, compute()


def engine_of(
    own: TinyTask,
    num_towers: int = 1,
    *,
    wire: str = "float32",
    sends_sums: bool = False,
    shares: tuple[float, ...] | None = None,
    **options,
):
    """The engine of a task whose only state is frozen weights, and a function that computes its first batch."""
    model, data = own.build_model(), as_batches(own.dataset("train", InputShard()))
    engine = WorkerEngine(
        own,
        model,
        cpus(num_towers),
        StepOptions(**options),
        Lookups(model, data.element_spec),
        shares=shares,
        num_servers=1,
        num_sharing=1,
        sends_sums=sends_sums,
        stand_in=None,
        wire_precision=wire,
    )
    engine.set_frozen([variable.numpy() for variable in model.non_trainable_variables])

    def compute() -> Computed:
        stored = engine.layout.stored({variable.path: variable.numpy() for variable in model.trainable_variables})
        batches = [next(iter(data))]
        rows = [(ids, table[ids]) for ids, table in zip(engine.wanted(batches), stored.tables, strict=True)]
        return engine.compute(0, 0, stored.vector, rows, np.zeros(0), batches)

    return engine, compute


def test_what_servers_send_stays_on_the_host_until_towers_read_it(monkeypatch):
    """TensorFlow puts tensors without a device on a GPU; here another CPU stands in for it."""
    engine, compute = engine_of(task(), 2)
    whole, given = engine._whole_function, []
    monkeypatch.setattr(engine, "_whole_function", lambda *values: given.extend(values[:3]) or whole(*values))
    with tf.device("/device:CPU:1"):
        compute()
    assert {value.device.rpartition("/")[2] for value in tf.nest.flatten(given)} == {"device:CPU:0"}


def test_a_share_too_small_for_the_batch_is_named_as_given():
    with refused("tower_shares=50,50,1: a tower gets no example of a batch of"):
        engine_of(task(), 3, shares=(50, 50, 1))


def test_the_template_is_on_the_host():
    options = types.SimpleNamespace(is_sync=False, wire_precision="float32")
    membership = types.SimpleNamespace(num_workers=1, servers=("a:1",), options=options)
    with tf.device("/device:CPU:1"):
        engine = roles._worker_engine(task(), cpus(2), StepOptions(), membership, None)
    assert {one.value.device.rpartition("/")[2] for one in engine._model.variables} == {"device:CPU:0"}


class Scaling(layers.Dense):
    """A layer that assigns its own kernel although it is frozen."""

    def call(self, inputs, training=None):
        self.kernel.assign(0.5 * self.kernel)
        return super().call(inputs)


def test_a_frozen_weight_that_a_pass_assigns_is_an_error_in_one_line():
    def build():
        inputs = keras.Input((2,))
        hidden = Scaling(3, trainable=False, name="scaling")(inputs)
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(hidden))

    batch = Batch(np.ones((6, 2), np.float32), np.zeros(6, np.int32))
    _, compute = engine_of(TinyTask(build=build, examples=batch))
    with refused("frozen weight scaling/kernel is assigned in a layer's call"):
        compute()


def whole(found: Computed) -> np.ndarray:
    """The gradient of all parameters, in the model's order, in float32."""
    [(ids, values)] = found.rows
    table = np.zeros((WORDS, WIDTH), np.float32)
    table[ids] = values
    # The table is the model's first parameter, the vector has the others.
    return np.concatenate([table.ravel(), found.gradient.astype(np.float32)])


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
    engine, found = computed(num_towers)
    np.testing.assert_allclose(whole(found), exact_gradient(), rtol=1e-5, atol=1e-7)
    assert found.examples == 6
    assert found.norm == pytest.approx(np.linalg.norm(exact_gradient()), rel=1e-5)


@pytest.mark.parametrize("num_towers", [1, 3])
def test_an_embedding_sends_only_the_rows_that_were_used(num_towers):
    engine, found = computed(num_towers)
    [(ids, values)] = found.rows
    assert sorted(ids) == list(USED) and values.shape == (len(USED), WIDTH)
    assert len(found.gradient) == LENGTH * WIDTH * NUM_CLASSES + NUM_CLASSES


def test_synchronous_workers_send_sums():
    engine, found = computed(sends_sums=True)
    np.testing.assert_allclose(whole(found), 6 * exact_gradient(), rtol=1e-5, atol=1e-6)
    assert found.weight == 6


def test_gradients_are_sent_in_the_wire_precision():
    engine, found = computed(wire="bfloat16")
    assert {array.dtype for array in (found.gradient, found.rows[0][1])} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_allclose(whole(found), exact_gradient(), rtol=2.0**-8, atol=1e-7)


def test_the_gradient_is_clipped_before_it_is_sent():
    engine, found = computed(clipping=Clipping(global_norm=0.01))
    assert np.linalg.norm(whole(found)) == pytest.approx(0.01, rel=1e-5)
    assert found.norm > 0.01, "the reported norm is before clipping"
