"""Batches by index, from one pipeline for as long as possible: a user's own one starts at its first batch."""

import tensorflow as tf

from strategies.servers.batch_reader import BatchReader
from tests.towers.user_errors import refused


class Pipeline:
    """A user's data: batch n is the number n. Counts starts and reads."""

    def __init__(self):
        self.starts, self.reads = 0, 0

    def dataset(self, first: int) -> tf.data.Dataset:
        self.starts += 1
        return tf.data.Dataset.from_generator(self._numbers, output_signature=tf.TensorSpec([], tf.int64)).skip(
            first
        )

    def _numbers(self):
        for number in range(1000):
            self.reads += 1
            yield number


def test_a_late_worker_reads_a_users_pipeline_once():
    """The worker is turned away from each round that it begins, and then begins a later one."""
    pipeline = Pipeline()
    reader, wanted = BatchReader(pipeline.dataset, 1), range(0, 400, 3)
    assert [int(reader.read(index)) for index in wanted] == list(wanted)
    assert pipeline.starts == 1
    assert pipeline.reads < 600, "tf.data reads some ahead; a start for each batch would read 27,000"


def test_a_batch_is_read_again_without_a_new_start():
    pipeline = Pipeline()
    reader = BatchReader(pipeline.dataset, 1)
    assert [int(reader.read(index)) for index in (4, 4, 5)] == [4, 4, 5]
    assert pipeline.starts == 1


def test_far_jumps_and_earlier_batches_start_again():
    pipeline = Pipeline()
    reader = BatchReader(pipeline.dataset, 1)
    assert [int(reader.read(index)) for index in (0, 900, 7)] == [0, 900, 7]
    assert pipeline.starts == 3


def test_each_residue_has_a_stream():
    def dataset(first: int) -> tf.data.Dataset:
        starts.append(first)
        return tf.data.Dataset.range(first, 100, 3)

    starts: list[int] = []
    reader, wanted = BatchReader(dataset, 3), [2, 5, 6, 8, 9, 14, 15]
    assert [int(reader.read(index)) for index in wanted] == wanted
    assert starts == [2, 6]
    with refused("the training data ended at batch 101", "repeat() it"):
        reader.read(101)
