"""The task of the tests' own programs: a small model on drawn numbers, whose input may be late or not finite."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from models.own_task import OwnTask


def build() -> keras.Model:
    inputs = keras.Input((4,), name="x")
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(inputs))


def with_statistics() -> keras.Model:
    """A model with moving statistics."""
    inputs = keras.Input((4,), name="x")
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(8, "relu", name="hidden")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def spoilt_task(
    spoil: Callable[[int], np.float32] | None,
    model: Callable[[], keras.Model] = build,
    spoil_evaluation: Callable[[int], np.float32] | None = None,
    data_is_checked: bool = False,
) -> OwnTask:
    """A task with batches of 24 examples: four in an epoch, and four in an evaluation.

    Args:
      model: builds the model.
      spoil: called with the number of each training batch when the batch is made; returns a factor for its
        features. None changes nothing.
      spoil_evaluation: likewise, for the batches of an evaluation.
      data_is_checked: whether no batch is read before the run.
    """
    spoils = {"train": spoil, "eval": spoil_evaluation}

    class SpoiltTask(OwnTask):
        def dataset(self, split, shard):
            batches = super().dataset(split, shard)
            if spoils[split] is None:
                return batches

            def spoilt(number, batch):
                factor = tf.numpy_function(spoils[split], [number], tf.float32)
                factor.set_shape([])
                return batch._replace(features=batch.features * factor)

            return batches.enumerate(shard.first_batch).map(spoilt)

    data = _drawn(0)
    SpoiltTask.data_is_checked = data_is_checked
    return SpoiltTask(model=model, train_data=data, eval_data=data, losses=_loss(), batch_size=24)


def pipeline_task(seed: int) -> OwnTask:
    """Likewise, with training data from an endless tf.data pipeline; its examples are drawn with this seed."""
    batches = tf.data.Dataset.from_tensor_slices(_drawn(seed)).batch(24).repeat()
    return OwnTask(model=build, train_data=batches, eval_data=_drawn(0), losses=_loss(), batch_size=24)


def _drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(96, 4)).astype(np.float32), draw.integers(0, 3, 96)


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
