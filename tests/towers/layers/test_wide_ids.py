"""Ids and labels of 32 bits stay on a GPU: its towers look ids up as int64, with the same bits."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.clicks_task import ClicksTask
from models.data.drawn_clicks import DrawnClicks
from models.data.drawn_text import DrawnText
from models.networks.transformer import TransformerSize
from models.own_task import OwnTask
from models.text_task import TextTask
from tests.towers.gpu_towers import AS_ON_GPUS, waits_of_tower
from towers.task import Batch
from towers.tower import TowerFunction

TEXT = TextTask(
    text=DrawnText(num_tokens=9, length=6), size=TransformerSize(blocks=1, width=8, heads=2), batch_size=4
)
CLICKS = ClicksTask(clicks=DrawnClicks(num_tables=2, num_rows=10), batch_size=4)


def own_task(**of_embedding) -> OwnTask:
    def model():
        ids = keras.Input((5,), dtype="int32")
        rows = keras.layers.Embedding(7, 3, name="table", **of_embedding)(ids)
        hidden = keras.layers.LSTM(4, name="hidden")(rows)
        return keras.Model(ids, keras.layers.Dense(3, name="logits")(hidden))

    draw = np.random.default_rng(4)
    data = draw.integers(0, 7, (8, 5)).astype(np.int32), draw.integers(0, 3, 8).astype(np.int32)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return OwnTask(model=model, train_data=data, losses=losses, batch_size=8)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(own_task(), id="own"),
        pytest.param(TEXT, id="text", marks=pytest.mark.full),
        pytest.param(CLICKS, id="clicks", marks=pytest.mark.full),
    ],
)
def test_the_host_waits_for_no_id_and_no_label(task):
    assert waits_of_tower(task) == []


@pytest.mark.full
@pytest.mark.parametrize("task", [TEXT, CLICKS, own_task()], ids=["text", "clicks", "own"])
def test_it_would_wait_for_ids_of_32_bits(task):
    found = waits_of_tower(task, dataclasses.replace(AS_ON_GPUS, wide_ids=False))
    assert any(wait.startswith("Cast > Less") for wait in found)


@pytest.mark.full
def test_lookups_have_the_same_bits():
    keras.utils.set_random_seed(2)
    task = own_task(mask_zero=True)
    model = task.build_model()
    batch = Batch(tf.constant([[0, 1, -1, 6, 0], [2, 2, 2, 0, 0]], tf.int32), tf.constant([1, 2], tf.int32))
    found = []
    for wide_ids in (False, True):
        tower = TowerFunction(task, model, kernels=dataclasses.replace(AS_ON_GPUS, wide_ids=wide_ids))
        values = [tf.convert_to_tensor(variable) for variable in tower.variables.parameters]
        result = tower(values, [], batch, tf.constant([1, 2]), tf.constant(1.0))
        found.append([result.loss_sum, *map(tf.convert_to_tensor, result.gradients)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
