"""Mistakes of data are found before training; one line says what came, what was expected and what to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from strategies.registry import build_strategy
from tests.strategies.small_task import small_strategy, small_task
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.options import StepOptions

N = 60
X = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
ONE_HOT = np.eye(2, dtype=np.float32)[Y]
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SQUARES = keras.losses.MeanSquaredError()
ONES = np.full((N, 5), 9)
WITH_NAN = np.where(np.arange(N) == 3, np.nan, 1).astype(np.float32)


def build():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])


def table():
    layers = [keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])


def two_outputs():
    inputs = keras.Input((5,))
    return keras.Model(inputs, {"a": keras.layers.Dense(2)(inputs), "b": keras.layers.Dense(3)(inputs)})


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)


class ReturnsNone(Subclassed):
    def call(self, inputs):
        super().call(inputs)


class ReturnsNothing(Subclassed):
    def call(self, inputs):
        super().call(inputs)
        return ()


class ReturnsNoneToo(Subclassed):
    def call(self, inputs):
        return {"a": super().call(inputs), "b": None}


class ReturnsNested(Subclassed):
    def call(self, inputs):
        return {"a": {"b": super().call(inputs)}}


class OfNumPy(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return np.mean(y_pred.numpy(), axis=-1)


class BuildsNothing(Subclassed):
    def build(self, input_shape):
        self.built = True


def with_build(kind):
    def make():
        model = kind()
        model.build((None, 5))
        return model

    return make


def called(kind=Subclassed):
    model = kind()
    model(X[:1])
    return model


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays)


def generator():
    yield X, Y


def without_shapes():
    return tf.data.Dataset.from_generator(generator, output_types=(tf.float32, tf.int64))


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return X, Y


def both(*data):
    return {"train_data": data, "eval_data": data}


def strategy_of(**fields):
    plain = {"model": build, "train_data": (X, Y), "eval_data": (X, Y), "losses": SPARSE, "batch_size": 20}
    return build_strategy("towers", OwnTask(**plain | fields), cpus(1), StepOptions())


MISTAKES = {
    "width": (both(X[:, :4], Y), ("'train' has features float32 [N, 4]", "the model takes float32 [N, 5]")),
    "width of the evaluation": ({"eval_data": (X[:, :4], Y)}, ("'eval' has features float32 [N, 4]",)),
    "rank": (both(X[:, 0], Y), ("features float32 [N]", "takes float32 [N, 5]")),
    "two arrays for one input": (
        both((X, X), Y),
        ("features (float32 [N, 5], float32 [N, 5])", "takes float32 [N, 5]", "give features"),
    ),
    "strings": (both(X.astype(str), Y), ("features string [N, 5]", "takes float32 [N, 5]")),
    "labels that are strings": (both(X, Y.astype(str)), ("labels string [N]", "returns float32 [N, 2]")),
    "objects": (both(X.astype(object), Y), ("train_data has an array of Python objects", "convert it")),
    "texts and a missing value": (
        both(np.array(["a", None] * 30, object), Y),
        ("Python objects, shape [60], some of them texts, and one None", "replace missing values"),
    ),
    "lists of different lengths": (
        both(np.array([[1] * (1 + i % 3) for i in range(N)], object), Y),
        ("Python objects, shape [60], one of them a list of 1", "fill them up to one length"),
    ),
    "a dict for an array": (both({"a": X}, Y), ("{'a': float32 [N, 5]}", "takes float32 [N, 5]")),
    "one-hot labels": (both(X, ONE_HOT), ("labels [N, 2] for outputs [N, 2]", "class numbers [N]", "argmax")),
    "fractions as classes": (both(X, X[:, 0]), ("class numbers", "fractions")),
    "outputs of another shape": (
        both(X, X[:, :3]) | {"losses": SQUARES},
        ("MeanSquaredError: labels [N, 3] for outputs [N, 2]", "the model's last layer"),
    ),
    "labels to broadcast": (both(X, X[:, :1]) | {"losses": SQUARES}, ("labels [N, 1] for outputs [N, 2]",)),
    "weights to broadcast": (
        both(X, Y, abs(X[:, :2])),
        ("weights [N, 2] for values [N]", "one weight for each example"),
    ),
    "no loss": ({"losses": None}, ("losses=None", "keras.losses.MeanSquaredError()")),
    "no loss for any output": ({"losses": {"a": None}}, ("training needs a loss",)),
    "an unknown loss": ({"losses": "nonsense"}, ("loss 'nonsense' is unknown", "MeanSquaredError()")),
    "single examples": ({"train_data": lambda: dataset(X, Y)}, ("train_data yields int64 scalars", ".batch(")),
    "single held-out examples": ({"eval_data": lambda: dataset(X, Y)}, ("eval_data yields int64", ".batch(")),
    "single one-hot examples": (
        {"train_data": lambda: dataset(X, ONE_HOT)},
        ("train_data yields tensors of 2, 5 examples", "add .batch("),
    ),
    "no features": (both(None, Y), ("train_data has no array of features", "(features, labels)")),
    "an empty dict of features": ({"eval_data": ({}, Y)}, ("eval_data has no array of features",)),
    "None in a dataset": (
        {"train_data": lambda: dataset(X, Y, None).batch(20)},
        ("train_data yields a NoneTensor", "omit None"),
    ),
    "windows instead of batches": (
        {"eval_data": lambda: dataset(X, Y).window(20)},
        ("eval_data yields a DatasetV2", ".batch(batch_size)"),
    ),
    "a call that returns None": (
        {"model": lambda: called(ReturnsNone)},
        ("the model returns a NoneType", "must return tensors", "correct what its call returns"),
    ),
    "a call that returns nothing": ({"model": lambda: called(ReturnsNothing)}, ("the model returns a tuple",)),
    "an output that is None": ({"model": lambda: called(ReturnsNoneToo)}, ("the model returns a NoneType",)),
    "outputs within outputs": (
        {"model": lambda: called(ReturnsNested), "losses": {"a": {"b": SPARSE}}, **both(X, {"a": {"b": Y}})},
        ("the model returns a dict within its dict of outputs", "return all outputs in one"),
    ),
    "a weight of no loss": (
        {"model": two_outputs, "losses": {"a": SPARSE}, "loss_weights": {"b": 2.0}, **both(X, {"a": Y})},
        ("loss_weights for 'b'", "has no loss", "omit its weight"),
    ),
    "a loss without labels": (
        {"model": two_outputs, "losses": {"a": SPARSE, "b": SQUARES}, **both(X, {"a": Y})},
        ("loss MeanSquaredError: there are no labels for its outputs [N, 3]", "pass labels for each output"),
    ),
    "a metric without labels": (
        {
            "model": two_outputs,
            "losses": {"a": SPARSE},
            "metric_functions": {"b": {"far": keras.metrics.mean_absolute_error}},
            **both(X, {"a": Y}),
        },
        ("metric 'b_far': there are no labels for its outputs [N, 3]",),
    ),
    "a generator": ({"train_data": generator()}, ("train_data is a generator", "from_generator")),
    "a function": ({"eval_data": generator}, ("eval_data is a function", "from_generator")),
    "a PyDataset": ({"train_data": lambda: Sequence()}, ("train_data is a Sequence", "from_generator")),
    "build() of a subclass": ({"model": with_build(Subclassed)}, ("has no variables", "model(features[:1])")),
    "a build() of its own": ({"model": with_build(BuildsNothing)}, ("has no variables", "model(features[:1])")),
    "weights that are NaN": (both(X, Y, WITH_NAN), ("train_data has weights that are NaN", "clean the data")),
    "weights that are NaN in a dataset": (
        {"train_data": lambda: dataset(X, Y, WITH_NAN).batch(20)},
        ("weights of the first batch of 'train' hold NaN",),
    ),
    "another batch size": (
        {"train_data": lambda: dataset(X, Y).batch(30), "batch_size": 60},
        ("batch_size=60", "has 30 examples", "pass batch_size=30"),
    ),
    "a batch of more than all": ({"batch_size": 100_000}, ("batch_size=100000", "60 training examples")),
    "weights below 0": (
        both(X, Y, X[:, 0]),
        ("train_data has weights below 0", "the smallest is -", "at least 0"),
    ),
    "weights below 0 in a dataset": (
        {"eval_data": lambda: dataset(X, Y, X[:, 0]).batch(20)},
        ("weights of the first batch of 'eval' are below 0",),
    ),
    "weights that are all 0": ({"eval_data": (X, Y, 0 * X[:, 0])}, ("eval_data has only weights of 0", "omit")),
    "parts of other lengths": (
        {
            "train_data": lambda: tf.data.Dataset.zip(
                dataset(X).batch(20), tf.data.Dataset.from_tensor_slices(Y).batch(19)
            )
        },
        ("the 'train' data failed at its first batches", "other numbers of examples"),
    ),
    "an evaluation without end": (
        {"eval_data": lambda: dataset(X, Y).batch(20).repeat()},
        ("the 'eval' data never end", "remove repeat()"),
    ),
    "too many parts": ({"eval_data": (X, Y, Y, Y)}, ("eval_data is a tuple of 4", "(features, labels)")),
    "too many parts of a dataset": (
        {"train_data": lambda: dataset(X, Y, Y, Y).batch(20)},
        ("an element of train_data is a tuple of 4",),
    ),
    "no labels": ({"train_data": X}, ("the data have no labels", "as train_data and eval_data")),
    "no labels to evaluate": ({"eval_data": (X, None)}, ("the first batch of 'eval': the data have no labels",)),
    "labels of an unknown output": (
        {"eval_data": (X, {"a": Y})},
        ("the first batch of 'eval': labels for 'a'", "use one of these names"),
    ),
    "complex features": (
        both(X.astype(np.complex64), Y),
        ("'train' has features complex64 [N, 5]", "the model takes float32 [N, 5]"),
    ),
    "complex labels": (both(X, Y + 1j), ("train_data has labels of complex128", "real numbers")),
    "dates": (
        both(np.full((N, 5), np.datetime64("2026-01-01")), Y),
        ("train_data has an array of datetime64", "numbers"),
    ),
    "long doubles": (
        both(X, Y.astype(np.longdouble)),
        (f"train_data has an array of {np.dtype(np.longdouble).name}", "numpy.array(list, 'float32')"),
    ),
    "lists of numbers": (both(X.tolist(), Y.tolist()), ("arrays of 0 examples", "pass arrays, not lists")),
    "a ragged tensor": (
        {"train_data": lambda: (tf.ragged.constant([[1.0] * (1 + i % 3) for i in range(N)]), Y)},
        ("train_data has a RaggedTensor", ".to_tensor()"),
    ),
    "a sparse tensor": (
        {"eval_data": lambda: (tf.sparse.from_dense(X), Y)},
        ("eval_data has a SparseTensor", "tf.sparse.to_dense"),
    ),
    "a sparse tensor in a dataset": (
        {"train_data": lambda: dataset(tf.sparse.from_dense(X), Y).batch(20)},
        ("train_data has a SparseTensor", "tf.sparse.to_dense"),
    ),
    "tensors of unknown shape": (
        {"train_data": lambda: without_shapes()},
        ("train_data has tensors of unknown shape", "output_signature"),
    ),
    "no model": ({"model": 5}, ("model=5", "a built keras.Model or a function")),
    "a seed that is text": ({"seed": "x"}, ("seed='x'", "an integer")),
    "a loss weight that is NaN": ({"loss_weights": float("nan")}, ("loss_weights=nan", "finite")),
    "a batch size that is no integer": ({"batch_size": 2.5}, ("batch_size=2.5", "an integer of at least 1")),
    "a batch size that is text": ({"batch_size": "32"}, ("batch_size='32'", "an integer of at least 1")),
    "no examples in a batch": ({"eval_batch_size": 0}, ("eval_batch_size=0", "an integer of at least 1")),
    "no threads": ({"num_input_threads": 0}, ("num_input_threads=0", "an integer of at least 1")),
    "an id outside of the table": (
        {"model": table, "train_data": (ONES, Y), "eval_data": (ONES, Y)},
        ("the model fails on the first batch of 'train', features int64 [N, 5]", "is not in [0, 5)"),
    ),
    "a metric named as what reports say": (
        {"metric_functions": {"loss": keras.metrics.sparse_categorical_accuracy}},
        ("a metric is named 'loss'", "rename the metric"),
    ),
    "a loss that NumPy computes": (
        {"losses": OfNumPy()},
        ("loss of_num_py: call() returns a ndarray", "must return a tensor", "keras.ops"),
    ),
    "a metric that NumPy computes": (
        {"metric_functions": {"a": lambda labels, outputs: outputs.numpy()[:, 0]}},
        ("metric 'a' returns a ndarray", "must return a tensor"),
    ),
    "a metric that returns nothing": (
        {"metric_functions": {"a": lambda labels, outputs: None}},
        ("metric 'a' returns a NoneType", "must return a tensor"),
    ),
    "no examples": (
        {"train_data": lambda: dataset(X, Y).batch(20).take(0)},
        ("the 'train' split is empty",),
    ),
}


def test_a_layer_name_that_graphs_do_not_take_is_refused():
    """Keras's `fit` fails too, with a traceback."""
    layers = [keras.Input((5,), name="the input"), keras.layers.Dense(2, name="my layer")]
    task = OwnTask(model=lambda: keras.Sequential(layers), train_data=(X, Y), losses=SPARSE, batch_size=10)
    with refused("a layer is named 'my layer'", "rename it"):
        build_strategy("towers", task, cpus(1), StepOptions())


@pytest.mark.parametrize("mode", first_quick(["multi_hot", "one_hot", "count"]))
def test_a_sparse_encoding_is_refused(mode):
    """Keras's `fit` fails too, with a traceback; when it no longer does, this needs no refusal."""

    def encoded():
        encoding = keras.layers.CategoryEncoding(10, output_mode=mode, sparse=True, name="encoding")
        return keras.Sequential([keras.Input((1,), dtype="int64"), encoding, keras.layers.Dense(2)])

    with pytest.raises(TypeError):
        tf.function(encoded(), autograph=False).get_concrete_function(tf.TensorSpec((None, 1), tf.int64))
    with refused("layer 'encoding', a CategoryEncoding, has sparse=True", "give it sparse=False"):
        strategy_of(model=encoded, **both(ONES[:, :1], Y))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name):
    fields, parts = MISTAKES[name]
    # TensorFlow and Keras objects are made here, not while the tests are collected.
    made = {
        key: value() if key.endswith("data") and getattr(value, "__name__", "") == "<lambda>" else value
        for key, value in fields.items()
    }
    with refused(*parts):
        strategy_of(**made)


def test_a_regularizer_that_fails_in_this_precision():
    """Keras's own regularizers compute with a float32 number."""

    def regularized():
        orthogonal = keras.regularizers.OrthogonalRegularizer(0.01)
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_regularizer=orthogonal)])

    task = OwnTask(model=regularized, **both(X, Y), losses=SPARSE, batch_size=20)
    assert build_strategy("towers", task, cpus(1), StepOptions()).run_steps(1).step == 1
    with refused("a regularizer of the model's weights fails", "or pass precision=float32 instead of float64 ("):
        build_strategy("towers", task, cpus(1), StepOptions(precision="float64"))


@pytest.mark.parametrize(
    "fields",
    first_quick(
        [
            {},
            both(X, Y[:, None]),
            both(X, Y.astype(np.float32)),
            both(X.astype(np.float64), Y),
            both(X, Y, np.ones((N, 1))),
            both(X[:, :, None], Y),
            {"model": called},
            {"losses": SQUARES} | both(X, ONE_HOT),
            {"eval_data": None},
        ],
        3,
    ),
)
def test_data_that_keras_accepts_are_accepted(fields):
    assert strategy_of(**fields).step == 0


def test_an_error_in_a_users_own_code_keeps_its_traceback():
    class Wrong(keras.layers.Layer):
        def call(self, inputs):
            if keras.config.floatx() and not isinstance(inputs, keras.KerasTensor):
                raise LookupError("a bug")
            return inputs

    def model():
        return keras.Sequential([keras.Input((5,)), Wrong(), keras.layers.Dense(2)])

    with pytest.raises(LookupError, match="a bug"):
        strategy_of(model=model)


def test_the_check_changes_nothing():
    """A model with batch norm and dropout has the same values and random states with the check and without."""

    def model():
        hidden = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        return keras.Sequential([keras.Input((5,)), *hidden, keras.layers.Dense(2)])

    checked = strategy_of(model=model)

    class Trusted(OwnTask):
        data_is_checked = True

    trusted = Trusted(model=model, train_data=(X, Y), eval_data=(X, Y), losses=SPARSE, batch_size=20)
    other = build_strategy("towers", trusted, cpus(1), StepOptions())
    for mine, others in zip(checked.model.variables, other.model.variables, strict=True):
        np.testing.assert_array_equal(mine, others)


def test_a_batch_of_a_built_in_task_must_not_be_larger_than_its_data():
    with refused("batch_size=38: there are 37 training examples", "at most batch_size=37"):
        small_strategy(small_task(batch_size=38))
