"""The workers of a ring read the same batches, also a worker that reads them once for each microbatch."""

import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from strategies.data_checks.batch_checksums import BatchChecksums
from strategies.registry import build_strategy
from strategies.ring.same_batches import check_same_batches
from tests.strategies.data_checks.test_first_batches import SPARSE, X, Y, build
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.options import StepOptions

NAMES = ("worker:0", "worker:1", "worker:2")


def checked(first: BatchChecksums, last: BatchChecksums, *, microbatches: int = 1, split: int = 0) -> None:
    """Checks what three workers read of a split: the first two `first`, the last one `last`."""
    found = np.zeros((3, 2, 5))
    found[:, :] = BatchChecksums().numbers(2)
    found[:, split] = [first.numbers(2), first.numbers(2), last.numbers(2)]
    check_same_batches(NAMES, found, microbatches=microbatches)


def checksums(examples=(1, 2), features=(3, 4), *, keeps_order=True) -> BatchChecksums:
    return BatchChecksums(examples=examples, features=features, keeps_order=keeps_order)


@pytest.mark.parametrize("split", [0, 1], ids=["train", "eval"])
def test_workers_with_other_data_are_refused(split):
    named = ("train", "eval")[split]
    with refused(f"worker:2 and worker:0 read different batches of '{named}'", "use shuffle(..., seed=1)"):
        checked(checksums(), checksums((1, 3)), split=split)
    with refused(f"worker:2 and worker:0 read different features of '{named}', with the same labels"):
        checked(checksums(), checksums(features=(3, 5)), split=split)


def test_data_that_are_fine():
    checked(checksums(), checksums())
    # Augmented at random, or shuffled differently in each pass.
    checked(checksums(features=()), checksums(features=()))
    checked(checksums(), checksums(features=()))
    checked(checksums(keeps_order=False), checksums(keeps_order=False))


def ring_strategy(*, accumulation: int, reshuffles: bool):
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(60, seed=1, reshuffle_each_iteration=reshuffles)
    task = OwnTask(model=build, train_data=rows.batch(20), losses=SPARSE, batch_size=20)
    return build_strategy("ring", task, cpus(1), StepOptions(accumulation=accumulation))


def test_microbatches_of_data_that_are_shuffled_at_each_reading_are_refused():
    said = "worker:0 reads the 'train' data in another order each time, and once for each of the 2 microbatches"
    with refused(said, "use shuffle(..., seed=1, reshuffle_each_iteration=False)"):
        ring_strategy(accumulation=2, reshuffles=True)
    ring_strategy(accumulation=2, reshuffles=False)
    ring_strategy(accumulation=1, reshuffles=True)
