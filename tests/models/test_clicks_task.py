"""ClicksTask: its batches, loss and metrics; towers train it exactly, with sparse gradients, and it learns."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.clicks_task import ClicksTask
from models.data.drawn_clicks import DrawnClicks
from models.tasks import build_task
from strategies.one_device_reference import reference_strategy
from strategies.training.verification import differences
from tests.tiers import first_quick
from tests.towers.tiny_tasks import trainer_of
from tests.towers.watched_rule import WatchedSGD
from towers.errors import UserError
from towers.precision import layer_precision
from towers.task import Batch, InputShard, Task
from towers.updates.rules import SGD, Momentum

SMALL = DrawnClicks(num_tables=3, num_rows=50, num_train=2_000, num_eval=300)


def clicks_task(**fields):
    return ClicksTask(**{"clicks": SMALL, "batch_size": 64, "width": 4} | fields)


def read(task, split="train", num_batches=3, **shard):
    return [
        tf.nest.map_structure(lambda tensor: tensor.numpy(), batch)
        for batch in task.dataset(split, InputShard(**shard)).take(num_batches)
    ]


def assert_same_examples(found, expected):
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def joined(parts):
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def test_it_implements_the_protocol():
    task = clicks_task()
    assert isinstance(task, Task)
    assert (task.num_examples("train"), task.num_examples("eval"), task.eval_batch_size) == (2_000, 300, 64)


def test_pairs_are_chosen_by_numbers_that_a_gpu_has_itself():
    """With int32 the host would compute what gradients need, and wait for each step's products."""
    task = clicks_task()
    model, (batch,) = task.build_model(), read(task, num_batches=1)
    graph = tf.function(lambda: model(batch.features), autograph=False).get_concrete_function().graph
    gathers = [operation.inputs for operation in graph.get_operations() if operation.type == "GatherV2"]
    assert [pairs.dtype for _, pairs, axis in gathers if tf.get_static_value(axis) == 1] == [tf.int64]


# --- batches


@pytest.mark.full
@pytest.mark.parametrize("shares", [None, (1.0, 3.0, 1.0)])
def test_readers_and_microbatches_make_up_the_batch(shares):
    task = clicks_task(batch_size=21)
    parts = [
        read(task, index=reader, count=3, shares=shares, microbatch=micro, num_microbatches=2)
        for micro in range(2)
        for reader in range(3)
    ]
    for whole, *of_parts in zip(read(task), *parts, strict=True):
        assert_same_examples(joined(of_parts), whole)


def test_a_stream_that_starts_later_or_takes_turns_has_the_same_batches():
    batches = read(clicks_task(), num_batches=7)
    assert_same_examples(read(clicks_task(), num_batches=2, first_batch=2, stride=3), [batches[2], batches[5]])


def test_another_seed_gives_another_order_of_the_same_examples():
    one, other = (read(clicks_task(seed=seed, batch_size=2_000), num_batches=1)[0].features for seed in (0, 1))
    assert not np.array_equal(one["dense"], other["dense"])
    np.testing.assert_array_equal(np.sort(one["dense"], axis=0), np.sort(other["dense"], axis=0))


def test_evaluation_is_one_pass_in_order():
    batches = read(clicks_task(eval_batch_size=128), "eval", num_batches=9)
    features, labels = SMALL.gather("eval", tf.range(300, dtype=tf.int64))
    assert [len(batch.labels) for batch in batches] == [128, 128, 44]
    whole = joined(batches)
    np.testing.assert_array_equal(whole.features["ids_2"], features["ids_2"])
    np.testing.assert_array_equal(whole.labels, labels)


# --- loss and metrics


@pytest.mark.parametrize("weights", [(), [0.0, 1.0, 2.0, 0.5]])
def test_loss_and_metrics_are_weighted_sums(weights):
    logits, labels = np.array([2.0, -1.0, 0.5, -3.0]), np.array([1, 1, 0, 0])
    batch = Batch((), tf.constant(labels), weights if weights == () else tf.constant(weights))
    each = np.ones(4) if weights == () else np.array(weights)
    outputs = tf.constant(logits[:, None], tf.float32)
    loss, metrics = clicks_task().loss(outputs, batch), clicks_task().metrics(outputs, batch)
    probabilities = 1 / (1 + np.exp(-logits))
    likelihoods = np.where(labels == 1, probabilities, 1 - probabilities)
    np.testing.assert_allclose(loss, (-(each * np.log(likelihoods)).sum(), each.sum()), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], (each[0] + each[3], each.sum()), rtol=1e-6)
    np.testing.assert_allclose(
        metrics["calibration"], ((each * probabilities).sum(), (each * labels).sum()), rtol=1e-6
    )


def test_loss_is_computed_in_float32():
    loss = clicks_task().loss(tf.constant([[100.0]], tf.bfloat16), Batch((), tf.constant([0])))
    assert loss.total.dtype == tf.float32 and float(loss.total) == 100.0


# --- the network


def test_dot_products_are_those_of_all_pairs():
    model = clicks_task().build_model()
    (batch,) = read(clicks_task(), num_batches=1)
    get = {layer.name: layer for layer in model.layers}
    bottom = keras.Model(model.inputs, get["bottom2"].output)
    pairs = keras.Model(model.inputs, get["bottom_and_pairs"].output)
    tables = [get[f"table_{table}"](batch.features[f"ids_{table}"]) for table in range(3)]
    vectors = np.stack([bottom(batch.features), *tables], axis=1)
    products = np.einsum("niw,njw->nij", vectors, vectors)
    expected = np.concatenate([vectors[:, 0], products[:, *np.triu_indices(4, 1)]], axis=1)
    np.testing.assert_allclose(pairs(batch.features), expected, rtol=1e-5, atol=1e-6)


def test_tables_take_the_models_inputs_themselves():
    model = clicks_task().build_model()
    inputs = {id(tensor) for tensor in model.inputs}
    tables = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    assert len(tables) == 3
    assert all(id(table.input) in inputs for table in tables)


def test_the_default_network_has_the_documented_size():
    assert build_task("clicks", network="dlrm", batch_size=64).build_model().count_params() == 134_193


def test_logits_are_float32_under_mixed_precision():
    with layer_precision("bfloat16"):
        model = clicks_task().build_model()
    (batch,) = read(clicks_task(), num_batches=1)
    logits = model(batch.features)
    assert logits.dtype == tf.float32 and logits.shape == (64, 1)


def test_a_saved_network_has_the_same_outputs(tmp_path):
    model = clicks_task().build_model()
    model.save(tmp_path / "model.keras")
    (batch,) = read(clicks_task(), num_batches=1)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(batch.features), model(batch.features), atol=1e-6)


# --- training


@pytest.mark.parametrize("precision", first_quick(["float32", "bfloat16"]))
def test_gradients_of_tables_are_sparse(precision):
    rule = WatchedSGD()
    trainer_of(clicks_task(), 2, rule=rule, precision=precision).run_steps(1)
    sparse = {path for path, kind in rule.seen.items() if issubclass(kind, tf.IndexedSlices)}
    assert sparse == {f"table_{table}/embeddings" for table in range(3)}


@pytest.mark.full
@pytest.mark.parametrize("rule", [SGD(), Momentum(momentum=0.9)])
def test_uneven_towers_equal_one_device(rule):
    """The last batch of an epoch has 2 examples for 3 towers."""
    task = clicks_task(batch_size=37)
    strategy = trainer_of(task, 3, shares=(3, 1, 2), rule=rule, precision="float64", rate=0.5)
    reference, how = reference_strategy(task, strategy, strategy.options)
    found = differences(strategy, reference, 60)
    assert how == "one device, each batch undivided"
    assert found[0].relative < 1e-10, found[0]


@pytest.mark.full
def test_it_learns_more_than_the_click_rate():
    """A constant guess reaches the entropy of the click rate; the true probabilities are far below it."""
    task = clicks_task(clicks=dataclasses.replace(SMALL, num_train=20_000, num_eval=4_000), eval_batch_size=1000)
    labels = np.concatenate([batch.labels for batch in read(task, "eval", 4)])
    rate = labels.mean()
    constant = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    strategy = trainer_of(task, 2, rule=Momentum(momentum=0.9, nesterov=True), rate=0.1)
    strategy.run_steps(600)
    evaluation = strategy.evaluate()
    assert evaluation["loss"] < 0.85 * constant
    assert evaluation["accuracy"] > 1 - rate


# --- by name


def test_it_is_built_by_name():
    task = build_task("clicks", network="dlrm", batch_size=64, clicks=SMALL, click_width=4, seed=3)
    assert isinstance(task, ClicksTask)
    assert (task.clicks, task.width, task.seed, task.name) == (SMALL, 4, 3, "clicks")


@pytest.mark.parametrize(
    ("task", "network", "message"),
    [
        ("clicks", "resnet20", "network='resnet20': task='clicks' has no images and trains only 'dlrm'"),
        ("shapes", "dlrm", "network='dlrm': it takes ids, and task='shapes' has images; .*resnet20"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(task, network, message):
    with pytest.raises(UserError, match=message) as error:
        build_task(task, network=network, batch_size=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["batch_size", "eval_batch_size", "width", "num_input_threads"])
def test_wrong_fields_are_refused(field):
    with pytest.raises(UserError, match=f"{field}=0: must be at least 1"):
        clicks_task(**{field: 0})


def test_unknown_split_is_refused():
    with pytest.raises(UserError, match="split='test': must be 'train' or 'eval'"):
        clicks_task().dataset("test", InputShard())
