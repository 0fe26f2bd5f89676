"""Mistakes in data that only a later batch shows: one line with the step, what was wrong and how to fix it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from strategies.data_checks.batches import as_batches
from strategies.data_checks.data_errors import readable_errors, readable_placement, readable_tracing
from strategies.registry import build_strategy
from strategies.servers.batch_reader import BatchReader
from strategies.synchronous import SynchronousStrategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.layers.batch_norm.loops import pixels_in_row
from towers.options import StepOptions

X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
IDS = np.random.default_rng(1).integers(0, 50, (60, 4)).astype(np.int32)
NUM_GOOD = 2


def model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])


def with_table():
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(50, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def failing() -> tf.data.Dataset:
    def batches():
        for _ in range(NUM_GOOD):
            yield X[:20], Y[:20]
        raise RuntimeError("disk 7 is gone")

    signature = (tf.TensorSpec((None, 5)), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def uneven() -> tf.data.Dataset:
    """Data with fewer labels than features from the third batch on."""
    labels = tf.constant(Y)
    return tf.data.Dataset.range(3).map(lambda index: (X[:20], labels[: tf.where(index < NUM_GOOD, 20, 19)]))


def with_negative_weight() -> tf.data.Dataset:
    weights = np.where(np.arange(60) == 45, -1, 1).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(20)


def with_nan() -> tf.data.Dataset:
    spoilt = np.where(np.arange(60)[:, None] == 45, np.nan, X).astype(np.float32)
    whole = tf.data.Dataset.from_tensor_slices((spoilt, Y)).batch(20)
    return whole.map(lambda x, y: (tf.debugging.check_numerics(x, "not clean"), y))


def task_of(**fields):
    plain = {"model": model, "train_data": (X, Y), "eval_data": (X, Y), "batch_size": 20}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return OwnTask(losses=loss, **plain | fields)


def strategy_of(**fields):
    return build_strategy("towers", task_of(**fields), cpus(2), StepOptions())


def of_one_reading() -> tf.data.Dataset:
    """Data from a generator that is made only once: the check before training uses it up."""
    generator = iter([(X[:20], Y[:20])] * NUM_GOOD)
    signature = (tf.TensorSpec((None, 5)), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(lambda: generator, output_signature=signature)


def test_data_that_can_be_read_once():
    with refused(
        "the training data ended at step 0",
        "must restart at each reading",
        "a function that makes a new generator",
    ):
        strategy_of(train_data=of_one_reading()).run_steps(1)


PIPELINES = {
    "a generator that raises": (failing, ("RuntimeError: disk 7 is gone", "test_data_errors.py, line")),
    "parts of other lengths": (uneven, ("other numbers of examples",)),
    "weights below 0": (
        with_negative_weight,
        (": weights are below 0: a weight is how much an example counts, so it must be at least 0; correct",),
    ),
    "a check of the user's": (with_nan, ("not clean", "NaN")),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PIPELINES)
def test_an_input_pipeline_that_fails(name):
    make, parts = PIPELINES[name]
    training, evaluating = strategy_of(train_data=make()), strategy_of(eval_data=make())
    with refused("the 'train' data failed at step 2: ", *parts, "start the same command again"):
        training.run_steps(5)
    with refused("the 'eval' data failed at batch 2: ", *parts):
        evaluating.evaluate()


def test_an_input_pipeline_of_a_worker_of_servers():
    reader = BatchReader(lambda first: failing().skip(first), stride=1)
    reader.read(0)
    with refused("the 'train' data failed at batch 2: RuntimeError: disk 7 is gone"):
        reader.read(2)


def test_a_weight_below_0_in_a_later_batch_of_a_worker_of_servers():
    reader = BatchReader(lambda first: as_batches(with_negative_weight().skip(first)), stride=1)
    assert reader.read(1).weights.numpy().tolist() == [1] * 20
    with refused("the 'train' data failed at batch 2: weights are below 0: ", "must be at least 0"):
        reader.read(2)


@pytest.mark.full
def test_ids_out_of_range():
    spoilt = np.where(np.arange(60)[:, None] == 45, 50, IDS).astype(np.int32)
    training = strategy_of(model=with_table, train_data=(spoilt, Y), eval_data=(IDS, Y))
    with refused(": id 50 is out of range", "has 50 rows, ids 0..49", "correct the ids"):
        training.run_steps(3)
    with refused("evaluation: id 50 is out of range"):
        strategy_of(model=with_table, train_data=(IDS, Y), eval_data=(spoilt, Y)).evaluate()


def narrow() -> tf.data.Dataset:
    """Data with features of another width from the third batch on."""

    def batches():
        for index in range(4):
            yield X[:20, : 5 if index < NUM_GOOD else 4], Y[:20]

    signature = (tf.TensorSpec((None, None)), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def test_features_of_another_width_in_a_later_batch():
    problem = "the features of a batch have shape [N, 4], and the model takes [N, 5]", "correct the data"
    with refused("step 2: ", *problem):
        strategy_of(train_data=narrow()).run_steps(3)
    with refused("evaluation: ", *problem):
        strategy_of(eval_data=narrow()).evaluate()


@keras.saving.register_keras_serializable("tests")
class _Huge(keras.layers.Layer):
    """In a graph, needs more memory than a machine can address."""

    def call(self, inputs):
        if tf.executing_eagerly():
            return inputs
        shape = tf.stack([tf.shape(inputs)[0], 5, 1 << 22, 1 << 22])
        return inputs + tf.reduce_max(2.0 * tf.broadcast_to(inputs[:, :, tf.newaxis, tf.newaxis], shape), [2, 3])

    def compute_output_shape(self, input_shape):
        return input_shape


# TensorFlow's allocator tries for ten seconds to find the memory.
@pytest.mark.full
def test_a_step_that_needs_more_memory_than_there_is():
    def huge():
        return keras.Sequential([keras.Input((5,)), _Huge(), keras.layers.Dense(2)])

    with refused("step 0: no memory on cpu:", ",5,4194304,4194304]; use accumulation=2, recompute='blocks' or"):
        strategy_of(model=huge).run_steps(1)


@pytest.mark.parametrize(
    "text, needed",
    [
        (
            "OOM when allocating tensor with shape[64,9] and type half on /job:worker/device:GPU:3 by allocator G",
            "no memory on gpu:3 for a tensor of shape [64,9]",
        ),
        (
            "Out of memory while trying to allocate 68852648264 bytes.\n\t [[{{node run}}]]",
            "for 68852648264 bytes",
        ),
        ("Out of memory while trying to allocate 16.00GiB.", "no memory for 16.00GiB"),
    ],
)
def test_the_memory_that_a_gpu_lacks(text, needed):
    error = tf.errors.ResourceExhaustedError(None, None, f"Graph execution error:\n\n{text}")
    with refused("step 7: ", needed), readable_errors("step 7"):
        raise error
    with pytest.raises(tf.errors.ResourceExhaustedError), readable_errors("step 7"):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")


@pytest.mark.full
def test_parameters_that_need_more_memory_than_there_is():
    def too_large(model, spec):
        return tf.zeros([2**40, 2**7])

    with refused("parameters and optimizer state: no memory on cpu:0", "128]; divide them by zero=3"):
        SynchronousStrategy("mirrored", task_of(), StepOptions(), too_large, 1)


def test_a_parameter_for_which_a_gpu_has_no_memory():
    """TensorFlow tells neither its shape nor its size."""
    text = (
        "Failed copying input tensor from /job:localhost/replica:0/task:0/device:CPU:0 to "
        "/job:localhost/replica:0/task:0/device:GPU:1 in order to run _EagerConst: Dst tensor is not initialized."
    )
    with refused("parameters and optimizer state: no memory on gpu:1; divide"), readable_placement():
        raise tf.errors.InternalError(None, None, text)
    with pytest.raises(tf.errors.InternalError), readable_placement():
        raise tf.errors.InternalError(None, None, "NCCL: unhandled system error")


def branching(values):
    return 2 * values if keras.ops.max(values) > 1 else values


NEED_VALUES = {
    "if": (branching, "Using a symbolic `tf.Tensor` as a Python `bool` is not allowed: "),
    "for": (lambda values: sum(iter(values)) * values, "Iterating over a symbolic `tf.Tensor` is not allowed: "),
    "numpy": (lambda values: values * np.mean(values), "Cannot convert a symbolic tf.Tensor"),
    "numpy()": (
        lambda values: values * values.numpy().mean(),
        "'SymbolicTensor' object has no attribute 'numpy': ",
    ),
    "float": (lambda values: values * float(values[0]), "float() argument must be"),
}


# A TypeError and an AttributeError first: the others differ from these in TensorFlow's words only.
@pytest.mark.parametrize("name", first_quick(["if", "numpy()", "for", "numpy", "float"], 2))
def test_a_users_own_code_that_needs_values_of_a_graph(name):
    """The check before training does not find this: it runs eagerly, and eager tensors have values."""
    scaled, reason = NEED_VALUES[name]

    class Loss(keras.losses.Loss):
        def call(self, labels, outputs):
            return scaled(keras.ops.mean(keras.ops.square(outputs - labels), -1))

    def metric(labels, outputs):
        return scaled(keras.metrics.mean_squared_error(labels, outputs))

    given = {"model": model, "train_data": (X, X[:, :2]), "eval_data": (X, X[:, :2]), "batch_size": 20}
    training = build_strategy("towers", OwnTask(losses=Loss(), **given), cpus(2), StepOptions())
    measured = OwnTask(losses="mse", metric_functions={"own": metric}, **given)
    evaluating = build_strategy("towers", measured, cpus(2), StepOptions())
    line = f" ({__file__}, line "
    with refused(f"step 0{line}", f"): {reason}", "use keras.ops.where"):
        training.run_steps(1)
    several = build_strategy(
        "towers", OwnTask(losses=Loss(), **given), cpus(2), StepOptions(), steps_per_execution=3
    )
    with refused(f"training{line}", f"): {reason}"):
        several.run_steps(3)
    with refused(f"evaluation{line}", f"): {reason}", "use keras.ops.where"):
        evaluating.evaluate()


def test_our_own_error_below_a_users_line_is_not_said_to_be_the_users():
    @tf.function(autograph=False)
    def step(count):
        return pixels_in_row(count, 3)  # A function of this project, which takes whole numbers only.

    with pytest.raises(TypeError, match="SymbolicTensor"), readable_tracing("step 0"):
        step(tf.constant(4))


@pytest.mark.full
def test_evaluation_data_without_weight():
    weights = tf.data.Dataset.from_tensor_slices((X, Y, np.zeros(60, np.float32))).batch(20)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    task = OwnTask(model=model, train_data=(X, Y), eval_data=weights, losses=loss, batch_size=20)
    with refused("the weights of the evaluation data add up to 0", "correct their weights"):
        build_strategy("towers", task, cpus(1), StepOptions()).evaluate()
