"""The batches of a worker of TensorFlow's engine: those that server 0's plan names."""

import numpy as np

from strategies.data_checks.batches import as_batches
from strategies.distribute.own_batches import OwnBatches
from tests.strategies.small_task import small_task
from towers.task import InputShard


def test_a_closure_reads_the_batches_from_the_planned_one_on():
    """For worker 1 of 2. A step that was claimed before is computed, but uses no batch."""
    dataset = as_batches(small_task().dataset("train", InputShard()))
    features = [batch.features.numpy() for batch in dataset.take(12)]
    index_of = {array.tobytes(): index for index, array in enumerate(features)}
    batches = OwnBatches(
        small_task(), rank=1, num_workers=2, stop_asked=lambda: False, before_step=lambda step: None
    )

    def read(*plan) -> list[int]:
        """The batches of a closure of three steps."""
        found = [batches.next_batch(np.int64(7), np.int64(index), np.int64(plan)) for index in range(3)]
        return [index_of[tensors[0].tobytes()] for tensors in found]

    assert read(0, 6, 3) == [3, 5, 7]
    assert read(2, 6, 9) == [9, 9, 9]
    assert read(0, 6, 5) == [5, 7, 9]
