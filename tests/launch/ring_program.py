"""A user's own program on a ring, in which one worker misbehaves; its environment says how:

MISCHIEF=nan       its part of the data is not finite from batch 4 on
MISCHIEF=slow      its input takes 0.2 seconds a batch
MISCHIEF=hang      its input hangs from batch 4 on
MISCHIEF=leave     it exits with code 0 after 4 steps
MISCHIEF=drift     one of its parameters changes by 1e-7 after 4 steps
MISCHIEF=shuffle   its data are a tf.data dataset that is shuffled with SEED, or without a seed if there is none

With DATA_IS_CHECKED=1 no batch is read before the run.
"""

import dataclasses
import os
import sys
import time

import numpy as np
import tensorflow as tf

from launch import binary, training
from strategies.callbacks import Callback
from strategies.ring.divergence import Diverged
from tests.launch.spoilt_task import spoilt_task

MISCHIEF = os.environ.get("MISCHIEF")
FROM_BATCH = 4


def spoil(batch_index):
    if MISCHIEF == "slow":
        time.sleep(0.2)
    if MISCHIEF == "hang" and batch_index >= FROM_BATCH:
        time.sleep(1000)
    return np.float32("nan" if MISCHIEF == "nan" and batch_index >= FROM_BATCH else 1)


def shuffled(task):
    seed = os.environ.get("SEED")
    rows = tf.data.Dataset.from_tensor_slices(task.train_data)
    rows = rows.shuffle(96, seed=None if seed is None else int(seed), reshuffle_each_iteration=False)
    return dataclasses.replace(task, train_data=rows.batch(task.batch_size, drop_remainder=True))


class Mischief(Callback):
    """The kinds of mischief that happen between steps."""

    def begin(self, run):
        self._strategy = run.strategy

    def boundaries(self):
        return (FROM_BATCH,)

    def before_steps(self, step):
        if step >= FROM_BATCH and MISCHIEF == "leave":
            sys.exit(0)
        if step == FROM_BATCH and MISCHIEF == "drift":
            self._strategy.engine.parameters()["logits/bias"].assign_add([0.0, 1e-7, 0.0])


def main(_):
    is_checked = bool(os.environ.get("DATA_IS_CHECKED"))
    task = spoilt_task(spoil if MISCHIEF in ("nan", "slow", "hang") else None, data_is_checked=is_checked)
    if MISCHIEF == "shuffle":
        task = shuffled(task)
    try:
        trainer = training.build_trainer(training.build_strategy(task))
        trainer._callbacks.append(Mischief())
        result = trainer.fit()
        print(result.summary["workers"])
        print("skipped", result.summary["skipped_steps"], "straggler", result.summary["straggler"])
    except Diverged as error:
        binary.fail(error)
        return 1
    return 0


if __name__ == "__main__":
    binary.run(main)
