"""A user's own program with a table of ROWS rows; each batch uses few of them.

BAD_FROM   the batch with this index and all later ones use a row that the table does not have
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from launch import binary, training
from models.own_task import OwnTask

_ROWS = int(os.environ.get("ROWS", 1000))
_BAD_FROM = int(os.environ.get("BAD_FROM", 2**31))
_WIDTH = 16


def build() -> keras.Model:
    ids = keras.Input((2,), dtype="int32", name="ids")
    rows = layers.Flatten(name="flat")(layers.Embedding(_ROWS, _WIDTH, name="words")(ids))
    return keras.Model(ids, layers.Dense(3, name="logits")(rows))


class LookupTask(OwnTask):
    def dataset(self, split, shard):
        batches = super().dataset(split, shard)
        if split != "train":
            return batches

        def spoilt(index, batch):
            is_bad = tf.cast(index >= _BAD_FROM, batch.features.dtype)
            return batch._replace(features=batch.features + is_bad * _ROWS)

        return batches.enumerate(shard.first_batch).map(spoilt)


def main(_):
    training.serve_if_server()
    draw = np.random.default_rng(0)
    data = draw.integers(0, _ROWS, (96, 2)).astype(np.int32), draw.integers(0, 3, 96)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = LookupTask(model=build, train_data=data, eval_data=data, losses=losses, batch_size=24)
    training.build_trainer(training.build_strategy(task)).fit()


if __name__ == "__main__":
    binary.run(main)
