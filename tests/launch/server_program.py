"""A user's own program on parameter servers: a small network whose input takes its time.

SECONDS_PER_BATCH   of each batch's input; default: 0.04
NAN_FROM            the input of batches from this one on is not finite
"""

import os
import time

import keras
import numpy as np
import tensorflow as tf

from launch import binary, train, training
from models.own_task import OwnTask

_SECONDS = float(os.environ.get("SECONDS_PER_BATCH", 0.04))
_NAN_FROM = int(os.environ.get("NAN_FROM", 2**31))


def build():
    inputs = keras.Input((4,), name="x")
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(inputs))


class SlowTask(OwnTask):
    """Its own task, but for what the environment says."""

    def dataset(self, split, shard):
        batches = super().dataset(split, shard)
        if split != "train":
            return batches

        def factor(number):
            time.sleep(_SECONDS)
            return np.float32("nan" if number >= _NAN_FROM else 1)

        def slow(number, batch):
            found = tf.numpy_function(factor, [number], tf.float32)
            found.set_shape([])
            return batch._replace(features=batch.features * found)

        return batches.enumerate(shard.first_batch).map(slow)


def main(_):
    training.serve_if_server()
    draw = np.random.default_rng(0)
    x = draw.normal(size=(96, 4)).astype(np.float32)
    y = draw.integers(0, 3, 96)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return train.train(SlowTask(model=build, train_data=(x, y), eval_data=(x, y), losses=losses, batch_size=24))


if __name__ == "__main__":
    binary.run(main)
