"""TextTask: its batches, its loss over valid tokens, and towers that train it exactly; it learns."""

import numpy as np
import pytest
import tensorflow as tf

from models.data.drawn_text import DrawnText
from models.networks.transformer import TRANSFORMERS, TransformerSize
from models.tasks import build_task, default_network, networks_of
from models.text_task import TextTask
from strategies.one_device_reference import reference_strategy
from strategies.training.verification import differences
from tests.tiers import first_quick
from tests.towers.tiny_tasks import trainer_of
from tests.towers.watched_rule import WatchedSGD
from towers.errors import UserError
from towers.task import Batch, InputShard, Task
from towers.updates.rules import Adam, Momentum

SMALL = DrawnText(num_tokens=9, length=6, num_train=200, num_eval=70)
TINY = TransformerSize(blocks=1, width=8, heads=2)


def text_task(**fields):
    return TextTask(**{"text": SMALL, "size": TINY, "batch_size": 21} | fields)


def read(task, split="train", num_batches=3, **shard):
    return [
        tf.nest.map_structure(lambda tensor: tensor.numpy(), batch)
        for batch in task.dataset(split, InputShard(**shard)).take(num_batches)
    ]


def joined(parts):
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def test_it_implements_the_protocol():
    task = text_task()
    assert isinstance(task, Task)
    assert (task.num_examples("train"), task.num_examples("eval"), task.eval_batch_size) == (200, 70, 21)


# --- batches


@pytest.mark.full
def test_readers_and_microbatches_make_up_the_batch():
    parts = [
        read(text_task(), index=reader, count=3, shares=(1.0, 3.0, 1.0), microbatch=micro, num_microbatches=2)
        for micro in range(2)
        for reader in range(3)
    ]
    for whole, *of_parts in zip(read(text_task()), *parts, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, joined(of_parts), whole)


def test_a_stream_that_starts_later_or_takes_turns_has_the_same_batches():
    batches = read(text_task(), num_batches=6)
    for one, other in zip(read(text_task(), num_batches=2, first_batch=2, stride=3), batches[2::3], strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_evaluation_is_one_pass_in_order():
    batches = read(text_task(eval_batch_size=32), "eval", num_batches=9)
    assert [len(batch.labels) for batch in batches] == [32, 32, 6]
    tokens, labels = SMALL.gather("eval", tf.range(70, dtype=tf.int64))
    np.testing.assert_array_equal(joined(batches).features, tokens)
    np.testing.assert_array_equal(joined(batches).labels, labels)


# --- loss and metrics


def logits_and_batch(weights=()):
    (batch,) = read(text_task(batch_size=4), num_batches=1)
    logits = np.random.default_rng(0).normal(size=(4, 6, 9)).astype(np.float32)
    given = weights if weights == () else np.array(weights, np.float32)
    return logits, batch._replace(weights=given)


@pytest.mark.parametrize("weights", first_quick([[0.0, 1.0, 2.0, 0.5], ((),)]))
def test_loss_and_accuracy_are_sums_over_valid_tokens(weights):
    logits, batch = logits_and_batch(weights)
    loss, metrics = text_task().loss(logits, batch), text_task().metrics(logits, batch)
    valid = (batch.labels > 0) * (1.0 if weights == () else np.array(weights)[:, None])
    assert 0 < np.sum(batch.labels > 0) < batch.labels.size
    chosen = np.take_along_axis(logits, batch.labels[..., None], -1)[..., 0]
    values = np.log(np.exp(logits).sum(-1)) - chosen
    np.testing.assert_allclose(loss, ((values * valid).sum(), valid.sum()), rtol=1e-5)
    right = logits.argmax(-1) == batch.labels
    np.testing.assert_allclose(metrics["accuracy"], ((right * valid).sum(), valid.sum()), rtol=1e-6)


def test_loss_is_computed_in_float32():
    logits = tf.constant([[[100.0, 0.0]]], tf.bfloat16)
    loss = text_task().loss(logits, Batch((), tf.constant([[1]])))
    assert loss.total.dtype == tf.float32 and float(loss.total) == 100.0


def test_padding_contributes_nothing_to_loss_and_gradients():
    """Other tokens in the padding change nothing."""
    task, model = text_task(), text_task().build_model()
    (batch,) = read(task, num_batches=1)
    noise = np.random.default_rng(0).integers(0, 9, batch.labels.shape)
    # The token at a text's end is read at the first padded position.
    other = batch._replace(features=np.where(batch.labels > 0, batch.features, noise).astype(np.int32))
    assert np.any(other.features != batch.features)

    def sums_and_gradients(batch):
        with tf.GradientTape() as tape:
            outputs = model(batch.features)
            loss = task.loss(outputs, batch)
        found = tape.gradient(loss.total, [variable.value for variable in model.trainable_variables])
        return [*loss, *(tf.convert_to_tensor(gradient) for gradient in found)]

    for one, expected in zip(sums_and_gradients(other), sums_and_gradients(batch), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


# --- training


@pytest.mark.full
def test_the_tied_tables_gradient_is_dense_and_that_of_positions_has_a_row_each():
    rule = WatchedSGD()
    trainer_of(text_task(), 2, rule=rule, precision="bfloat16").run_steps(1)
    sparse = {path for path, kind in rule.seen.items() if issubclass(kind, tf.IndexedSlices)}
    assert "token_embedding/embeddings" in rule.seen
    assert sparse == {"position_embedding/embeddings"}


@pytest.mark.full
def test_uneven_towers_equal_one_device_with_adam():
    """The towers have different numbers of texts and of valid tokens; an epoch's last batch has 11 texts."""
    task = text_task()
    strategy = trainer_of(task, 2, shares=(3, 1), rule=Adam(), precision="float64", rate=0.01)
    reference, how = reference_strategy(task, strategy, strategy.options)
    found = differences(strategy, reference, 12)
    assert how == "one device, each batch undivided"
    assert found[0].relative < 1e-9, found[0]


@pytest.mark.full
def test_uneven_towers_with_dropout_equal_one_device_that_computes_the_same_parts():
    task = text_task(dropout=0.2)
    strategy = trainer_of(task, 2, shares=(3, 1), rule=Momentum(momentum=0.9), precision="float64", rate=0.05)
    reference, _ = reference_strategy(task, strategy, strategy.options)
    assert differences(strategy, reference, 12)[0].relative < 1e-9


@pytest.mark.full
def test_it_learns_what_only_two_tokens_tell():
    """The last token alone gives an accuracy of little more than 1/4; no model has a loss below the entropy."""
    text = DrawnText(num_tokens=8, length=16, num_train=4_000, num_eval=1_000)
    task = text_task(text=text, size=TransformerSize(blocks=1, width=32, heads=2), batch_size=64)
    strategy = trainer_of(task, rule=Adam(), rate=3e-3)
    first = strategy.run_steps(1)
    strategy.run_steps(200)
    evaluation = strategy.evaluate()
    assert first.loss > np.log(7)
    assert text.entropy - 0.02 < evaluation["loss"] < text.entropy + 0.1
    assert 0.45 < evaluation["accuracy"] < 0.55


# --- by name


def test_it_is_built_by_name():
    task = build_task(
        "text", network="transformer_tiny", batch_size=64, text=SMALL, text_dropout=0.1, seed=3, eval_batch_size=8
    )
    assert isinstance(task, TextTask)
    assert (task.text, task.size, task.dropout) == (SMALL, TRANSFORMERS["transformer_tiny"], 0.1)
    assert (task.batch_size, task.eval_batch_size, task.seed, task.name) == (64, 8, 3, "text")
    assert default_network("text") == "transformer" and networks_of("text") == tuple(TRANSFORMERS)


@pytest.mark.parametrize(
    ("task", "network", "message"),
    [
        ("text", "dlrm", "network='dlrm': task='text' .* only 'transformer', .*; use 'transformer' or omit"),
        ("clicks", "transformer", "network='transformer': task='clicks' .* only 'dlrm'"),
        ("shapes", "transformer", "network='transformer': it takes tokens, and .* images; use task='text'"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(task, network, message):
    with pytest.raises(UserError, match=message) as error:
        build_task(task, network=network, batch_size=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields", [{"batch_size": 0}, {"num_input_threads": 0}, {"dropout": 1.0}, {"dropout": -0.1}]
)
def test_wrong_fields_are_refused(fields):
    ((name, value),) = fields.items()
    with pytest.raises(UserError, match=f"{name}={value}: must be"):
        text_task(**fields)


def test_unknown_split_is_refused():
    with pytest.raises(UserError, match="split='test': must be 'train' or 'eval'"):
        text_task().dataset("test", InputShard())
