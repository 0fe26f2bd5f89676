"""OwnTask: its loss and metrics equal those that Keras reports for the same model and data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from tests.tiers import first_quick
from towers.errors import UserError
from towers.task import Batch, InputShard, Task, as_batch, steps_per_epoch

RANDOM = np.random.default_rng(0)
N = 12
X = RANDOM.normal(size=(N, 5)).astype(np.float32)
KINDS = RANDOM.integers(0, 3, N)
VALUES = RANDOM.normal(size=(N, 2)).astype(np.float32)
WEIGHTS = RANDOM.uniform(0.1, 2.0, N).astype(np.float32)
TOKENS = RANDOM.integers(1, 7, (N, 6)) * (np.arange(6) < RANDOM.integers(1, 7, (N, 1)))
NEXT_TOKENS = RANDOM.integers(0, 4, (N, 6))


def dense_model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])


def flat_model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])


def single_value_model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])


def sequence_model(mask_zero=False):
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(7, 3, mask_zero=mask_zero),
            keras.layers.Dense(4),
        ]
    )


def masked_model():
    return sequence_model(mask_zero=True)


def two_headed(as_dict):
    inputs = keras.Input((5,))
    heads = {
        "values": keras.layers.Dense(2, name="values")(inputs),
        "kind": keras.layers.Dense(3, name="kind")(inputs),
    }
    return keras.Model(inputs, heads if as_dict else list(heads.values()))


def sparse(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def own_task(**fields):
    return OwnTask(
        **{"model": dense_model, "train_data": (X, KINDS), "losses": sparse(), "batch_size": 4} | fields
    )


def ours(task, model, data, parts=1):
    """The loss and the metrics as `parts` towers compute them."""
    batch = as_batch(tf.nest.map_structure(tf.constant, data))
    step = N // parts
    total, weight, metrics = 0.0, 0.0, {}
    for start in range(0, N, step):
        part = Batch(*tf.nest.map_structure(lambda array: array[start : start + step], tuple(batch)))  # noqa: B023
        outputs = model(part.features)
        loss = task.loss(outputs, part)
        total, weight = total + float(loss.total), weight + float(loss.weight)
        for name, value in task.metrics(outputs, part).items():
            sums = metrics.setdefault(name, np.zeros(2))
            sums += [float(value.total), float(value.weight)]
    return {"loss": total / weight} | {name: sums[0] / sums[1] for name, sums in metrics.items()}


def keras_says(model, data, **compiled):
    model.compile(**compiled)
    x, y, *w = data
    return model.evaluate(x, y, sample_weight=w[0] if w else None, batch_size=N, verbose=0, return_dict=True)


MEAN, BY_WEIGHT = "sum_over_batch_size", "mean_with_sample_weight"


MODELS = [
    (masked_model, TOKENS, NEXT_TOKENS, sparse),
    (flat_model, X, VALUES, keras.losses.MeanSquaredError),
    (dense_model, X, KINDS, sparse),
    (single_value_model, X, VALUES[:, 0], keras.losses.Huber),
    (sequence_model, TOKENS, NEXT_TOKENS, sparse),
]


@pytest.mark.parametrize("weighted", first_quick([True, False]))
# With one reduction all models, with the other reductions the first ones.
@pytest.mark.parametrize(
    "build, x, y, loss, reduction",
    [
        *((*model, MEAN) for model in MODELS),
        *first_quick(((*model, BY_WEIGHT) for model in MODELS), 2),
        *first_quick(((*model, "mean") for model in MODELS[1:] + MODELS[:1]), 1),
    ],
)
def test_the_loss_of_one_output_equals_that_of_keras(build, x, y, loss, reduction, weighted):
    weights = WEIGHTS if y.ndim == 1 or y is VALUES else np.tile(WEIGHTS[:, None], 6)
    data = (x, y, weights) if weighted else (x, y)
    model, one = build(), loss(reduction=reduction)
    task = own_task(model=build, train_data=data, losses=one)
    expected = keras_says(model, data, loss=one)["loss"]
    for parts in (3, 1):
        np.testing.assert_allclose(ours(task, model, data, parts)["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("weighted", first_quick([True, False]))
# A model whose outputs are a dict needs losses by name.
@pytest.mark.parametrize("as_dict, by_name", first_quick([(True, True), (False, False), (False, True)]))
@pytest.mark.parametrize("loss_weights", first_quick([{"values": 0.3, "kind": 2.0}, None]))
def test_the_loss_of_several_outputs_equals_that_of_keras(as_dict, by_name, loss_weights, weighted):
    labels = {"values": VALUES, "kind": KINDS}
    losses = {"values": keras.losses.MeanSquaredError(), "kind": sparse()}
    if not by_name:
        labels, losses = list(labels.values()), list(losses.values())
        loss_weights = loss_weights and list(loss_weights.values())
    data = (X, labels, WEIGHTS) if weighted else (X, labels)
    model = two_headed(as_dict)
    task = own_task(model=model, train_data=data, losses=losses, loss_weights=loss_weights)

    # Keras accepts weights of several outputs only in the structure of the outputs.
    def in_keras_way(given):
        return given if as_dict or not isinstance(given, dict) else list(given.values())

    for_keras = (X, in_keras_way(labels))
    if weighted:
        for_keras += (tf.nest.map_structure(lambda _: WEIGHTS, in_keras_way(labels)),)
    compiled = {"loss": in_keras_way(losses), "loss_weights": in_keras_way(loss_weights)}
    expected = keras_says(model, for_keras, **compiled)["loss"]
    np.testing.assert_allclose(ours(task, model, data, 3)["loss"], expected, rtol=1e-5)


def test_outputs_with_different_weights():
    labels, weights = {"values": VALUES, "kind": KINDS}, {"values": WEIGHTS, "kind": WEIGHTS[::-1].copy()}
    losses = {"values": keras.losses.MeanSquaredError(), "kind": sparse()}
    model, data = two_headed(True), (X, labels, weights)
    expected = keras_says(model, data, loss=losses)["loss"]
    task = own_task(model=model, train_data=data, losses=losses)
    np.testing.assert_allclose(ours(task, model, data, 2)["loss"], expected, rtol=1e-5)


def test_an_output_needs_no_loss():
    model = two_headed(True)
    task = own_task(model=model, train_data=(X, {"kind": KINDS}), losses={"kind": sparse()})
    loss = task.loss(model(X), Batch(X, {"kind": tf.constant(KINDS)}))
    expected = sparse()(KINDS, model(X)["kind"])
    np.testing.assert_allclose(loss.total / loss.weight, expected, rtol=1e-5)


@pytest.mark.parametrize("loss", [sparse, keras.losses.MeanSquaredError], ids=["sparse", "squares"])
def test_gradients_of_float64_outputs_are_not_rounded(loss):
    """Otherwise a verification in float64 would compare numbers that each mode rounds to float32 differently."""
    outputs = tf.constant(RANDOM.normal(size=(N, 3)))
    labels = tf.constant(KINDS if loss is sparse else RANDOM.normal(size=(N, 3)))
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        total = own_task(losses=loss()).loss(outputs, Batch(tf.constant(X), labels)).total
    found = tape.gradient(total, outputs).numpy()
    if loss is sparse:
        expected = tf.nn.softmax(outputs).numpy() - np.eye(3)[KINDS]
    else:
        expected = 2 * (outputs.numpy() - labels.numpy())
    scale = (found * expected).sum() / (expected**2).sum()
    np.testing.assert_allclose(found, scale * expected, rtol=1e-12)


@pytest.mark.parametrize("loss_weights", [{"values": 0.3}, [0.3, None], np.array([0.3, 1.0])], ids=str)
def test_an_output_without_a_factor_counts_once(loss_weights):
    model, data = two_headed(isinstance(loss_weights, dict)), (X, {"values": VALUES, "kind": KINDS})
    losses = {"values": keras.losses.MeanSquaredError(), "kind": sparse()}
    found, expected = (
        ours(own_task(model=model, train_data=data, losses=losses, loss_weights=factors), model, data)["loss"]
        for factors in (loss_weights, {"values": 0.3, "kind": 1.0})
    )
    assert found == expected


def test_an_ignored_class_counts_as_in_keras():
    labels = np.where(RANDOM.uniform(size=NEXT_TOKENS.shape) < 0.4, -1, NEXT_TOKENS)
    model, loss = masked_model(), sparse(ignore_class=-1)
    task = own_task(model=masked_model, train_data=(TOKENS, labels), losses=loss)
    expected = keras_says(model, (TOKENS, labels), loss=loss)["loss"]
    for parts in (3, 1):
        np.testing.assert_allclose(ours(task, model, (TOKENS, labels), parts)["loss"], expected, rtol=1e-5)


def test_an_ignored_class_of_one_of_several_outputs_is_refused():
    data = (X, [VALUES, KINDS])
    losses = [keras.losses.MeanSquaredError(), sparse(ignore_class=-1)]
    task = own_task(model=two_headed(False), train_data=data, losses=losses)
    assert "ignore_class" in refused_loss(task, two_headed(False), data)


class Squared(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.square(y_true - y_pred)


@pytest.mark.parametrize("parts", [3, 1])
def test_a_users_own_loss_and_metric_get_labels_of_the_outputs_rank(parts):
    """Labels [N] for outputs [N, 1] would be broadcast to [N, N]."""
    model, data = single_value_model(), (X, VALUES[:, 0])
    functions = {"far": lambda labels, outputs: keras.ops.abs(labels - outputs)}
    task = own_task(model=single_value_model, train_data=data, losses=Squared(), metric_functions=functions)
    apart = VALUES[:, :1] - model(X)
    found = ours(task, model, data, parts)
    np.testing.assert_allclose(found["loss"], np.mean(np.square(apart)), rtol=1e-5)
    np.testing.assert_allclose(found["far"], np.mean(np.abs(apart)), rtol=1e-5)


@pytest.mark.parametrize("name", first_quick(["mse", "MeanSquaredError", "mean_squared_error", "kld", "bce"], 2))
def test_losses_by_keras_names(name):
    model, task = flat_model(), own_task(model=flat_model, train_data=(X, VALUES), losses=name)
    expected = keras_says(model, (X, VALUES), loss=name)["loss"]
    np.testing.assert_allclose(ours(task, model, (X, VALUES))["loss"], expected, rtol=1e-5)


def test_none_for_weights_or_for_labels_without_a_loss_is_nothing():
    task = own_task(train_data=(X, KINDS, None))
    assert task.num_examples("train") == N and read(task)[0].weights == ()
    task = own_task(model=two_headed(False), train_data=(X, (None, KINDS)), losses=[None, sparse()])
    batch = read(task)[0]
    loss = task.loss(two_headed(False)(batch.features), Batch(*tf.nest.map_structure(tf.constant, tuple(batch))))
    assert float(loss.weight) == 4


def test_loss_weight_of_one_output():
    model = dense_model()
    expected = keras_says(model, (X, KINDS), loss=sparse(), loss_weights=0.25)["loss"]
    task = own_task(loss_weights=0.25)
    np.testing.assert_allclose(ours(task, model, (X, KINDS))["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("build", first_quick([masked_model, dense_model, sequence_model], 2))
def test_metrics_equal_keras_weighted_metrics(build):
    y = KINDS if build is dense_model else NEXT_TOKENS
    x = X if build is dense_model else TOKENS
    weights = WEIGHTS if build is dense_model else np.tile(WEIGHTS[:, None], 6)
    model, data = build(), (x, y, weights)
    expected = keras_says(
        model,
        data,
        loss=sparse(),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    functions = {"accuracy": keras.metrics.sparse_categorical_accuracy}
    task = own_task(model=build, train_data=data, metric_functions=functions)
    made = ours(task, model, data, 3)
    np.testing.assert_allclose(made["accuracy"], expected["accuracy"], rtol=1e-5)


def test_metrics_by_output_have_keras_names():
    model = two_headed(False)
    labels = {"values": VALUES, "kind": KINDS}
    task = own_task(
        model=model,
        train_data=(X, labels),
        losses={"values": keras.losses.MeanSquaredError(), "kind": sparse()},
        metric_functions={"kind": {"accuracy": keras.metrics.sparse_categorical_accuracy}},
    )
    made = ours(task, model, (X, labels))
    expected = keras.metrics.sparse_categorical_accuracy(KINDS, model(X)[1]).numpy().mean()
    assert set(made) == {"loss", "kind_accuracy"} and made["kind_accuracy"] == pytest.approx(expected)


def test_metrics_that_would_have_one_name_are_refused():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, {name: keras.layers.Dense(3, name=name)(inputs) for name in ("a", "a_b")})
    accuracy, labels = keras.metrics.sparse_categorical_accuracy, {"a": KINDS, "a_b": KINDS}
    task = own_task(
        model=model,
        train_data=(X, labels),
        losses={"a": sparse(), "a_b": sparse()},
        metric_functions={"a": {"b_c": accuracy}, "a_b": {"c": accuracy}},
    )
    with pytest.raises(UserError, match="two metrics .* are named 'a_b_c'"):
        ours(task, model, (X, labels))


def test_metrics_of_outputs_without_names_are_a_list():
    class TwoHeaded(keras.Model):
        def __init__(self):
            super().__init__()
            self.heads = [keras.layers.Dense(2), keras.layers.Dense(3)]

        def call(self, inputs):
            return tuple(head(inputs) for head in self.heads)

    def build():
        model = TwoHeaded()
        model(X)
        return model

    labels, functions = (VALUES, KINDS), [{"far": keras.metrics.mean_absolute_error}, {}]
    losses = [keras.losses.MeanSquaredError(), sparse()]
    task = own_task(model=build, train_data=(X, labels), losses=losses, metric_functions=functions)
    model = task.build_model()
    made = ours(task, model, (X, labels), 3)
    assert set(made) == {"loss", "output_0_far"}
    np.testing.assert_allclose(made["output_0_far"], np.mean(np.abs(VALUES - model(X)[0])), rtol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "none", None])
def test_reductions_that_do_not_add_up_are_refused(reduction):
    with pytest.raises(UserError, match="reduction=") as error:
        own_task(losses={"a": sparse(reduction=reduction)})
    assert "\n" not in str(error.value)


class WholeBatch(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(y_pred)


def test_a_loss_that_reduces_by_itself_is_refused():
    """A run itself divides the sum of `call`'s values, so it would leave out such a loss's own factor."""

    class Doubled(keras.losses.MeanSquaredError):
        def __call__(self, labels, outputs, sample_weight=None):
            return 2 * super().__call__(labels, outputs, sample_weight)

    with pytest.raises(UserError, match=r"Doubled has a __call__\(\) of its own"):
        own_task(losses=Doubled())


def test_a_loss_with_one_value_for_the_batch_is_refused():
    message = refused_loss(own_task(losses=WholeBatch()), dense_model(), (X, KINDS))
    assert "call() returns one number for the batch: must return one value for each example" in message


def test_outputs_without_a_last_dimension_are_refused_with_what_to_do():
    flat = keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Dense(1), keras.layers.Reshape(())])
    message = refused_loss(own_task(losses=keras.losses.MeanSquaredError()), flat, (X, KINDS))
    assert "let the model return [N, 1] instead of [N]" in message


@pytest.mark.parametrize(
    "function, found",
    [
        (lambda labels, outputs: keras.ops.mean(outputs), "one number for the batch"),
        (lambda labels, outputs: keras.ops.mean(outputs, axis=0), "shape [3]"),
        (lambda labels, outputs: keras.ops.mean(outputs, keepdims=True), "shape [1, 1]"),
    ],
)
def test_a_metric_without_a_value_for_each_example_is_refused(function, found):
    """Such a metric's means over the parts would be averaged, whatever the sizes of the parts."""
    task, model = own_task(metric_functions={"far": function}), dense_model()
    spec = (tf.TensorSpec([None, 5]), tf.TensorSpec([None], tf.int64))
    with pytest.raises(UserError) as error:
        metrics = tf.function(lambda x, y: task.metrics(model(x), Batch(x, y)), autograph=False)
        metrics.get_concrete_function(*spec)
    assert f"metric 'far' returns {found}: must return one value for each example" in str(error.value)
    assert "\n" not in str(error.value)


class StepsByItself(keras.Model):
    def train_step(self, data):
        return {"loss": keras.ops.mean(self(data[0]))}


class ComputesItsLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred)


class EvaluatesItself(keras.Model):
    def test_step(self, data):
        return {"loss": keras.ops.mean(self(data[0]))}


class MakesItsFunctions(keras.Model):
    def make_train_function(self, force=False):
        self.train_function = lambda iterator: {"loss": 0.0}


@pytest.mark.parametrize(
    "kind, method",
    [
        (StepsByItself, "train_step"),
        (ComputesItsLoss, "compute_loss"),
        (EvaluatesItself, "test_step"),
        (MakesItsFunctions, "make_train_function"),
    ],
)
def test_a_model_with_steps_of_its_own_is_refused(kind, method):
    """No mode calls such steps: the model would train with another loss than its author thinks."""

    def build():
        inputs = keras.Input(X.shape[1:])
        return kind(inputs, keras.layers.Dense(3)(inputs))

    for model in (build, build()):
        with pytest.raises(UserError) as error:
            own_task(model=model).build_model()
        assert f"{kind.__name__} has a {method}() of its own" in str(error.value) and "\n" not in str(error.value)


def refused_loss(task, model, data):
    with pytest.raises(UserError) as error:
        ours(task, model, data)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_losses_without_a_common_divisor_are_refused():
    labels = {"values": VALUES, "kind": KINDS}
    losses = {"values": keras.losses.MeanSquaredError(reduction=BY_WEIGHT), "kind": sparse()}
    data = (X, labels, WEIGHTS)
    task = own_task(model=two_headed(True), train_data=data, losses=losses)
    assert BY_WEIGHT in refused_loss(task, two_headed(True), data)
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(7, 3, mask_zero=True)(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(4)(hidden), keras.layers.Dense(4)(hidden)])
    data = (TOKENS, [NEXT_TOKENS, NEXT_TOKENS])
    assert "mask" in refused_loss(own_task(model=model, train_data=data), model, data)


def test_weights_of_an_output_that_nothing_weighs_are_refused():
    model, data = two_headed(True), (X, {"values": VALUES, "kind": KINDS}, {"values": WEIGHTS})
    fields = {"model": model, "train_data": data, "losses": {"kind": sparse()}}
    assert "weights for 'values': this output has no loss" in refused_loss(own_task(**fields), model, data)
    task = own_task(**fields, metric_functions={"values": {"far": keras.metrics.mean_absolute_error}})
    assert set(ours(task, model, data)) == {"loss", "values_far"}


@pytest.mark.parametrize(
    "fields, labels, part",
    [
        ({"losses": {"values": sparse(), "knd": sparse()}}, {"values": KINDS, "kind": KINDS}, "'knd'"),
        ({"losses": [sparse()] * 3}, [KINDS, KINDS], "3 losses for 2 outputs"),
        ({"loss_weights": [1.0]}, [KINDS, KINDS], "1 loss_weights for 2 outputs"),
        ({}, KINDS, "one array of labels for 2 outputs"),
        (
            {"metric_functions": {"a": keras.metrics.sparse_categorical_accuracy}},
            [KINDS % 2] * 2,
            "each function must be for one output",
        ),
    ],
)
def test_fields_that_do_not_match_the_outputs_are_refused(fields, labels, part):
    data = (X, labels)
    task = own_task(**{"model": two_headed(False), "train_data": data} | fields)
    assert part in refused_loss(task, two_headed(False), data)


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"losses": keras.losses.sparse_categorical_crossentropy}, "must be an instance of a Keras loss"),
        ({"losses": lambda labels, outputs: labels - outputs}, "or a subclass of keras.losses.Loss"),
        ({"losses": "mean_square"}, "unknown to Keras"),
        ({"losses": keras.losses.Circle()}, "compares the examples of a batch with each other"),
        ({"loss_weights": ["1"]}, "must be finite numbers"),
        ({"metric_functions": [keras.metrics.mean_absolute_error]}, "must be functions by name"),
        ({"metric_functions": {3: keras.metrics.mean_absolute_error}}, "must be functions by name"),
        ({"metric_functions": {"a": {3: keras.metrics.mean_absolute_error}}}, "must be functions by name"),
        ({"metric_functions": {"a": keras.metrics.SparseCategoricalAccuracy()}}, "for each example"),
        ({"train_data": (np.ma.masked_less(X, 0), KINDS)}, "masked values"),
        ({"train_data": (X, KINDS[:5])}, "train_data has arrays of 5, 12 examples"),
        ({"eval_data": (X[:0], KINDS[:0])}, "eval_data has arrays of 0 examples"),
        ({"batch_size": None}, "arrays need a batch size"),
        ({"batch_size": 0}, "batch_size=0"),
        (
            {"train_data": tf.data.Dataset.from_tensor_slices((X, KINDS)).batch(5), "batch_size": None},
            "pass batch_size",
        ),
        ({"train_data": tf.data.Dataset.from_tensor_slices(KINDS)}, "scalars"),
        (
            {"train_data": tf.data.Dataset.from_tensor_slices((X, KINDS)).batch(6, drop_remainder=True)},
            "yields batches of 6",
        ),
    ],
)
def test_wrong_fields_are_refused(fields, part):
    with pytest.raises(UserError) as error:
        own_task(**fields)
    assert part in str(error.value) and "\n" not in str(error.value)


def read(task, split="train", num_batches=9, **shard):
    return [
        tf.nest.map_structure(lambda tensor: tensor.numpy(), batch)
        for batch in task.dataset(split, InputShard(**shard)).take(num_batches)
    ]


def test_arrays_are_shuffled_in_the_same_order():
    features, labels = {"a": X, "b": [TOKENS, np.arange(N)]}, {"y": VALUES}
    task = own_task(train_data=(features, labels, WEIGHTS), batch_size=5, seed=1)
    assert isinstance(task, Task) and task.num_examples("train") == N
    epoch = read(task, num_batches=3)
    order = np.concatenate([batch.features["b"][1] for batch in epoch])
    assert sorted(order) == list(range(N)) and order.tolist() != list(range(N))
    for batch in epoch:
        chosen = batch.features["b"][1]
        np.testing.assert_array_equal(batch.features["a"], X[chosen])
        np.testing.assert_array_equal(batch.labels["y"], VALUES[chosen])
        np.testing.assert_array_equal(batch.weights, WEIGHTS[chosen])


def test_arrays_are_evaluated_in_order():
    batches = read(own_task(eval_data=(X, KINDS), eval_batch_size=7), "eval")
    assert [len(batch.labels) for batch in batches] == [7, 5]
    np.testing.assert_array_equal(np.concatenate([batch.labels for batch in batches]), KINDS)


def test_float64_arrays_become_float32_as_in_keras():
    (batch,) = read(own_task(train_data=(X.astype(np.float64), KINDS)), num_batches=1)
    assert batch.features.dtype == np.float32 and batch.labels.dtype == KINDS.dtype


def numbered(num_examples=11, batch_size=4):
    numbers = tf.data.Dataset.range(num_examples).batch(batch_size)
    return numbers.map(lambda number: (tf.cast(number, tf.float32)[:, None], number))


def test_a_dataset_is_repeated_divided_and_started_anywhere():
    task = own_task(train_data=numbered(), batch_size=4)
    whole = [batch.labels.tolist() for batch in read(task, num_batches=7)]
    assert whole[:4] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [0, 1, 2, 3]]
    parts = [read(task, num_batches=7, index=index, count=2, shares=(3.0, 1.0)) for index in range(2)]
    joined = [[*first.labels, *second.labels] for first, second in zip(*parts, strict=True)]
    assert joined == whole
    for first in (2, 3, 5):
        assert [batch.labels.tolist() for batch in read(task, num_batches=2, first_batch=first)] == (
            whole[first : first + 2]
        )


def test_a_dataset_without_known_length_is_started_by_skipping():
    data = numbered().filter(lambda features, labels: labels[0] != 4)
    task = own_task(train_data=data, batch_size=4, eval_data=data)
    assert read(task, num_batches=1, first_batch=3)[0].labels.tolist() == [8, 9, 10]
    assert [batch.labels.tolist() for batch in read(task, "eval")] == [[0, 1, 2, 3], [8, 9, 10]]


def test_a_dataset_says_how_many_batches_an_epoch_has():
    data = numbered()
    lengths = {data: 3, data.repeat(): None, data.filter(lambda features, labels: True): None}
    for train_data, expected in lengths.items():
        task = own_task(train_data=train_data, batch_size=4)
        assert task.num_examples("train") is None
        assert task.batches_per_epoch == steps_per_epoch(task) == expected
    assert (own_task().batches_per_epoch, steps_per_epoch(own_task())) == (None, -(-N // 4))


def test_a_datasets_element_spec_has_the_batch_size():
    data = tf.data.Dataset.from_tensor_slices(X).batch(3, drop_remainder=True)
    task = own_task(train_data=data, batch_size=None)
    assert task.batch_size == 3 and task.num_examples("train") is None
    assert read(task, num_batches=1)[0].labels == ()


@pytest.mark.parametrize("drop_remainder, expected", [(True, 3), (False, 5)])
def test_evaluation_batches_have_the_size_of_a_datasets_element_spec(drop_remainder, expected):
    data = tf.data.Dataset.from_tensor_slices((X, KINDS)).batch(3, drop_remainder=drop_remainder)
    assert own_task(eval_data=data, batch_size=5).eval_batch_size == expected


def test_evaluation_without_data_is_refused():
    assert own_task().num_examples("eval") == 0
    with pytest.raises(UserError, match="eval_data=None"):
        own_task().dataset("eval", InputShard())


def test_copies_start_with_the_users_weights():
    model = keras.Sequential([keras.Input((5,)), dense_model()])
    for one in (model, model.layers[0]):
        one.compile("sgd", "mse", steps_per_execution=2)  # Changes nothing here.
    task = own_task(model=model)
    one, other = task.build_model(), task.build_model()
    assert one is not model and one is not other
    np.testing.assert_array_equal(one(X), model(X))
    one.weights[0].assign(tf.zeros_like(one.weights[0]))
    np.testing.assert_array_equal(other(X), model(X))


def test_a_copy_normalizes_as_the_users_model():
    """Keras computes the constants of an adapted layer when it is adapted or built, not when weights are set."""
    norm = keras.layers.Normalization()
    norm.adapt(10 * X + 100)
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(3)])
    np.testing.assert_array_equal(own_task(model=model).build_model()(X), model(X))


def test_a_variable_that_is_frozen_alone_is_frozen_in_the_copy():
    model = dense_model()
    model.layers[0].kernel.trainable = False
    copy = own_task(model=model).build_model()
    assert [one.trainable for one in copy.variables] == [one.trainable for one in model.variables]
    assert len(copy.trainable_variables) == 3


def test_a_variables_own_regularizer_and_constraint_are_in_the_copy():
    """Also if the layer got other ones after it was built."""
    model = dense_model()
    model.layers[0].kernel.regularizer, model.layers[0].bias.constraint = (
        keras.regularizers.L2(),
        keras.constraints.NonNeg(),
    )
    model.layers[-1].kernel_regularizer = keras.regularizers.L1()
    copy = own_task(model=model).build_model()
    for ours, theirs in zip(copy.variables, model.variables, strict=True):
        assert (ours.regularizer, ours.constraint) == (theirs.regularizer, theirs.constraint)
    assert copy.layers[0].kernel.regularizer and not copy.layers[-1].kernel.regularizer


class Scaled(keras.layers.Dense):
    """A layer whose configuration lacks the factor."""

    def __init__(self, units, factor=1.0, **options):
        super().__init__(units, **options)
        self._keep(factor)

    def _keep(self, factor):
        self.factor = factor

    def call(self, inputs):
        return super().call(inputs)


class ScaledInPrivate(Scaled):
    def _keep(self, factor):
        self._factor = keras.ops.convert_to_tensor(factor)


@pytest.mark.parametrize("kind", [Scaled, ScaledInPrivate])
def test_a_copy_that_would_lose_a_layers_setting_is_refused(kind):
    for factor in (1.0, 3.0):
        layer = kind(3, factor=factor, name="scaled")
        task = own_task(model=keras.Sequential([keras.Input(X.shape[1:]), layer]))
        if factor == 1.0:
            task.build_model()
        else:
            with pytest.raises(UserError, match=r"copy of layer 'scaled' loses its factor; return factor from"):
                task.build_model()


def test_a_copy_that_would_lose_what_was_set_later_is_refused():
    layer = Scaled(3)
    model = keras.Sequential([keras.Input(X.shape[1:]), layer])
    own_task(model=model).build_model()
    layer.factor = 3.0
    with pytest.raises(UserError, match="loses its factor"):
        own_task(model=model).build_model()


def test_weights_that_their_gradient_overwrites_are_refused():
    def build():
        model = dense_model()
        model.quantize("float8")
        return model

    with pytest.raises(UserError, match="is overwritten by its gradient"):
        own_task(model=build).build_model()


def test_a_copy_that_would_lose_a_vocabulary_is_refused():
    lookup = keras.layers.StringLookup()
    lookup.adapt(["a", "b", "c"])
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, keras.layers.Embedding(9, 3)(lookup(inputs)))
    with pytest.raises(UserError, match="loses the vocabulary"):
        own_task(model=model).build_model()
    given = keras.layers.StringLookup(vocabulary=["a", "b"])
    own_task(model=keras.Model(inputs, keras.layers.Embedding(9, 3)(given(inputs)))).build_model()


@pytest.mark.parametrize("ragged", ["array", "dataset"])
def test_ragged_features_are_refused(ragged):
    features = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [1]])
    dataset = tf.data.Dataset.from_tensor_slices((features, KINDS[:4])).batch(2)
    with pytest.raises(UserError, match="RaggedTensor.*to_tensor"):
        own_task(train_data=dataset if ragged == "dataset" else (features, KINDS[:4]))


def test_arrays_of_bfloat16():
    own_task(train_data=(X.astype(tf.bfloat16.as_numpy_dtype), KINDS))


class Column:
    """As a column of pandas: it has a type and a shape of its own, and NumPy makes an array of it."""

    dtype = object()

    def __init__(self, *values):
        self.values = np.array(values, object)
        self.shape = self.values.shape

    def __array__(self, dtype=None, copy=None):
        return self.values.astype(dtype or object)


TEXTS = ["a", "bc", "d", "\N{LATIN SMALL LETTER E WITH ACUTE}"]


@pytest.mark.parametrize(
    "texts",
    [
        np.array(TEXTS, object),
        np.array(TEXTS, np.dtypes.StringDType()),
        np.array([text.encode() for text in TEXTS], object)[:, None],
        Column(*TEXTS),
    ],
    ids=["objects", "StringDType", "bytes", "column"],
)
def test_texts_as_python_objects(texts):
    (batch,) = read(own_task(train_data=({"texts": texts}, texts), batch_size=4), num_batches=1)
    for part in (batch.features["texts"], batch.labels):
        assert part.shape == texts.shape
        assert sorted(text.decode() for text in part.flat) == sorted(TEXTS)


def test_a_column_of_texts_and_a_missing_value_is_refused():
    with pytest.raises(UserError, match="some of them texts, and one nan: .*replace missing values"):
        own_task(train_data=(Column("a", "b", float("nan")), np.arange(3)), batch_size=3)


class Subclassed(keras.Model):
    def __init__(self, width, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(width)

    def call(self, inputs):
        return self.dense(inputs)


def test_models_that_are_not_built_or_copied_are_refused():
    with pytest.raises(UserError, match="call model.build"):
        own_task(model=lambda: Subclassed(3)).build_model()
    with pytest.raises(UserError, match="call model.build"):
        own_task(model=lambda: "model").build_model()
    built = Subclassed(3)
    built.build((None, 5))
    with pytest.raises(UserError, match="pass a function"):
        own_task(model=built).build_model()


def test_the_loss_works_in_a_graph_with_unknown_batch_size():
    task, model = own_task(), dense_model()
    spec = (tf.TensorSpec([None, 5]), tf.TensorSpec([None], tf.int64))

    @tf.function(input_signature=spec, autograph=False)
    def loss(x, y):
        return tuple(task.loss(model(x), Batch(x, y)))

    total, weight = loss(X, KINDS)
    np.testing.assert_allclose(total / weight, sparse()(KINDS, model(X)), rtol=1e-5)
    assert [float(value) for value in loss(X[:0], KINDS[:0])] == [0.0, 0.0]
