"""Layers with loops and conditions: they train as with Keras's variables, or are refused in one line."""

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, images, parameters_of, stacked, trainer_of
from tests.towers.user_errors import refused


class Either(layers.Layer):
    """Calls a layer in the branch of a condition that holds; the other branch calls none."""

    def __init__(self, inner: layers.Layer, **options):
        super().__init__(**options)
        self.inner = inner

    def call(self, inputs, training=None):
        return ops.cond(ops.sum(inputs) < 1e9, lambda: self.inner(inputs, training=training), lambda: inputs * 2)


class Cell(layers.Layer):
    """A recurrent cell of one layer."""

    state_size = 3

    def __init__(self, inner: layers.Layer, **options):
        super().__init__(**options)
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs, states, training=None):
        outputs = self.inner(inputs, training=training)
        return outputs, [outputs]


class Centred(layers.Layer):
    """Subtracts the mean of its inputs: either a mean that it first assigns, or a mean without a gradient."""

    def __init__(self, assigns: bool, **options):
        super().__init__(**options)
        self.assigns = assigns

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False, name="mean")

    def call(self, inputs, training=None):
        mean = ops.mean(inputs, axis=range(inputs.ndim - 1))
        if not self.assigns:
            return inputs - ops.stop_gradient(mean)
        self.mean.assign(mean)
        return inputs - self.mean


class Noisy(layers.Layer):
    """Adds random numbers from Keras's global generator, which belongs to no layer."""

    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs))


class Measured(layers.Layer):
    """A layer with a metric of its own, whose variables are no weights of the model either."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean = keras.metrics.Mean()

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


class Counting(layers.Layer):
    """Counts its calls in a plain TensorFlow variable; only reads another one."""

    def __init__(self, count, **options):
        super().__init__(**options)
        self.calls, self.offset = tf.Variable(0.0), tf.Variable(1.0, trainable=False)
        self.count = count

    def call(self, inputs):
        self.count(self.calls)
        return inputs + self.offset


def task_of(*stack: layers.Layer) -> TinyTask:
    def build():
        last = layers.Flatten(), layers.Dense(NUM_CLASSES, name="logits")
        return stacked((6, 6, 3), *stack, *last)

    return TinyTask(build=build, examples=images(8))


def trained(*stack: layers.Layer) -> dict:
    strategy = trainer_of(task_of(*stack), 2)
    strategy.run_steps(3)
    return parameters_of(strategy)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: layers.Dense(3, "gelu", name="inner"), id="dense", marks=pytest.mark.full),
        pytest.param(lambda: layers.Conv2D(3, 3, padding="same", name="inner"), id="convolution"),
    ],
)
def test_a_layer_with_weights_in_a_condition(make):
    def trained_from_a_seed(change):
        keras.utils.set_random_seed(3)
        return trained(change(make()))

    found = trained_from_a_seed(lambda layer: Either(layer, name="either"))
    expected = trained_from_a_seed(lambda layer: layer)
    assert_close({name.removeprefix("either/"): value for name, value in found.items()}, expected)


def test_no_gradient_passes_through_an_assignment():
    def trained_from_a_seed(assigns):
        keras.utils.set_random_seed(3)
        return trained(layers.Conv2D(3, 3, name="before"), Centred(assigns))

    assert_close(trained_from_a_seed(assigns=True), trained_from_a_seed(assigns=False))


def test_a_layer_may_have_a_metric():
    assert trained(Measured())


def test_a_layer_may_read_a_tensorflow_variable():
    assert trained(Counting(tf.identity))


REFUSED = {
    "a trainable weight": (
        [layers.SpectralNormalization(layers.Conv2D(4, 3), name="spectral")],
        ["kernel is assigned", "but it is trainable"],
    ),
    "random numbers in a loop": (
        [layers.Reshape((36, 3)), layers.RNN(Cell(layers.Dropout(0.5)))],
        ["draws random numbers in a loop", "unroll=True"],
    ),
    "statistics in a loop": (
        [layers.Reshape((36, 3)), layers.RNN(Cell(layers.BatchNormalization()))],
        ["moving_mean is assigned in a loop", "unroll=True"],
    ),
    "statistics in a condition": (
        [Either(layers.BatchNormalization(name="norm"))],
        ["norm/moving_mean is assigned in a condition", "call its layer outside"],
    ),
    "a tf.Variable": (
        [Counting(lambda calls: calls.assign_add(1.0), name="counting")],
        ["the tf.Variable 'calls' of layer 'counting' is assigned", "add_weight"],
    ),
    "a tf.Variable in a condition": (
        [Counting(lambda calls: tf.cond(calls < 9.0, lambda: calls.assign_add(1.0), lambda: calls))],
        ["the tf.Variable 'calls'", "is assigned", "add_weight"],
    ),
    "random numbers of nobody": ([Noisy()], ["each step would draw the same ones", "SeedGenerator"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_assignment_that_towers_cannot_make(what):
    stack, parts = REFUSED[what]
    with refused(*parts):
        trained(*stack)


def test_the_states_of_a_stateful_layer_are_no_weights():
    def build():
        inputs = layers.Input(batch_shape=(8, 6, 6, 3))
        states = layers.LSTM(4, stateful=True, name="lstm")(layers.Reshape((36, 3))(inputs))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(states))

    strategy = trainer_of(TinyTask(build=build, examples=images(8)), 1)
    with refused("lstm/rnn_state is assigned", "no weight of the model", "omit stateful=True"):
        strategy.run_steps(1)


@pytest.mark.full
@pytest.mark.parametrize(
    "stack",
    [
        [layers.Reshape((36, 3)), layers.LSTM(4, dropout=0.5, recurrent_dropout=0.5)],
        [layers.AveragePooling2D(3), layers.Reshape((4, 3)), layers.RNN(Cell(layers.Dropout(0.5)), unroll=True)],
        [Either(layers.Dropout(0.5))],
    ],
    ids=["a cell of Keras", "an unrolled loop", "a condition"],
)
def test_random_numbers_that_differ_in_each_step_are_drawn(stack):
    assert trained(*stack)


def test_keras_s_own_scope_would_accept_them():
    """Otherwise the tests above would show nothing."""
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.SpectralNormalization(layers.Conv2D(4, 3))])
    with keras.StatelessScope():
        model(ops.ones((1, 6, 6, 3)), training=True)
