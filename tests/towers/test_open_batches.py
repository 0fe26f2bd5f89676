"""Iterators over batches: nobody waits for their deletion, and they are closed before the interpreter ends."""

import atexit
import subprocess
import sys
import threading
import time
import weakref

import pytest
import tensorflow as tf

from towers.input import open_batches
from towers.input.open_batches import OpenBatches

# Its generator stands still in the second batch, which tf.data reads ahead.
_STANDS_STILL = """
import threading, time
import tensorflow as tf
from towers.input.open_batches import OpenBatches

stands_still = threading.Event()

def numbers():
    yield 1.0
    stands_still.set()
    time.sleep(600)

dataset = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.float32))
batches = OpenBatches(iter(dataset.prefetch(1)))
print(float(next(batches)))
assert stands_still.wait(60)
"""


def numbers():
    yield from range(10)


def test_what_is_open_at_the_exit_is_closed():
    inner = numbers()
    deleted = weakref.ref(inner)
    batches = OpenBatches(inner)
    del inner
    assert [next(batches), next(batches)] == [0, 1] and deleted() is not None
    atexit.unregister(open_batches._close_all)
    try:
        open_batches._close_all()
    finally:
        atexit.register(open_batches._close_all)
    assert deleted() is None and list(batches) == []


def test_nobody_waits_for_a_batch_that_is_being_read():
    stands_still, goes_on = threading.Event(), threading.Event()

    def slow_numbers():
        yield 1.0
        stands_still.set()
        goes_on.wait(60)

    dataset = tf.data.Dataset.from_generator(slow_numbers, output_signature=tf.TensorSpec([], tf.float32))
    batches = OpenBatches(iter(dataset.prefetch(1)))
    assert float(next(batches)) == 1.0
    assert stands_still.wait(60)
    began = time.monotonic()
    deletion = batches.close()
    del batches
    assert time.monotonic() - began < 5
    assert deletion.is_alive(), "the iterator waits for the batch"
    goes_on.set()
    deletion.join(60)
    assert not deletion.is_alive()


@pytest.mark.full
def test_a_program_ends_although_a_batch_is_being_read():
    ended = subprocess.run(
        [sys.executable, "-c", _STANDS_STILL], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "1.0\n"
