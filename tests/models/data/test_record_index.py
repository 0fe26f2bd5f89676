"""Records read by index equal those of a sequential read."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.record_index import RecordRange, index_records
from models.data.record_store import ExitGate, RecordReader, RecordStore
from tests import tiers
from towers.errors import UserError


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def write(path, records):
    with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        for record in records:
            writer.write(record)
    return os.fspath(path)


def whole(path, num_records):
    return RecordRange(path=path, skip=0, take=num_records)


@settings(max_examples=20 if tiers.runs_full else 6, deadline=None)
@given(files=st.lists(st.lists(st.binary(max_size=300), max_size=9), min_size=1, max_size=4), data=st.data())
def test_random_access_equals_a_sequential_read(tmp_path_factory, files, data):
    folder = tmp_path_factory.mktemp("files")
    paths = [write(folder / f"{index}.tfrecord", records) for index, records in enumerate(files)]
    index = index_records([whole(path, len(records)) for path, records in zip(paths, files, strict=True)])
    sequential = list(tf.data.TFRecordDataset(paths).as_numpy_iterator())
    assert len(index) == len(sequential)
    wanted = data.draw(st.lists(st.integers(0, len(sequential) - 1), max_size=12)) if sequential else []
    read = RecordReader(index).read(np.array(wanted, np.int64))
    assert read.tolist() == [sequential[record] for record in wanted]


def test_a_range_is_a_part_of_its_file(folder):
    path = write(folder / "a", [b"0", b"1", b"2", b"3", b"4"])
    index = index_records([RecordRange(path=path, skip=3, take=2), RecordRange(path=path, skip=0, take=1)])
    assert RecordReader(index).read(np.arange(3)).tolist() == [b"3", b"4", b"0"]


@pytest.mark.parametrize("num_bytes", [0, 5, 12, 20, -1])
def test_a_truncated_file_is_refused(folder, num_bytes):
    path = write(folder / "a", [b"a record", b"another"])
    with open(path, "rb+") as file:
        file.truncate(num_bytes if num_bytes >= 0 else os.path.getsize(path) + num_bytes)
    with pytest.raises(UserError, match="incomplete") as error:
        index_records([whole(path, 2)])
    assert "\n" not in str(error.value)


def test_a_file_of_another_format_is_refused(folder):
    path = folder / "a"
    path.write_bytes(bytes(range(1, 200)))
    with pytest.raises(UserError, match="not a TFRecord file"):
        index_records([whole(os.fspath(path), 1)])


def test_a_missing_file_is_refused(folder):
    with pytest.raises(UserError, match="No such file"):
        index_records([whole(os.fspath(folder / "none"), 1)])


def image_records(num_images):
    images = np.random.default_rng(0).integers(0, 256, (num_images, 3, 4, 1)).astype(np.uint8)
    return images, [bytes([label % 5]) + image.tobytes() for label, image in enumerate(images)]


def record_store(path, num_records, num_classes=5):
    def decode(record):
        content = tf.io.decode_raw(record, tf.uint8)
        return tf.reshape(content[1:], [3, 4, 1]), tf.cast(content[0], tf.int64)

    return RecordStore(
        index=index_records([whole(path, num_records)]),
        decode=decode,
        image_shape=(3, 4, 1),
        num_classes=num_classes,
    )


def test_the_store_gathers_in_a_graph_of_several_threads(folder):
    images, records = image_records(40)
    store = record_store(write(folder / "a", records), 40)
    indices = np.random.default_rng(1).integers(0, 40, (30, 7))
    dataset = tf.data.Dataset.from_tensor_slices(indices).map(
        tf.autograph.experimental.do_not_convert(store.gather), num_parallel_calls=4
    )
    assert dataset.element_spec[0].shape.as_list() == [7, 3, 4, 1]
    for wanted, (read, labels) in zip(indices, dataset, strict=True):
        np.testing.assert_array_equal(read, images[wanted])
        np.testing.assert_array_equal(labels, wanted % 5)


def test_the_store_gathers_no_images(folder):
    _, records = image_records(3)
    images, labels = record_store(write(folder / "a", records), 3).gather(tf.zeros([0], tf.int64))
    assert images.shape == (0, 3, 4, 1) and labels.shape == (0,)


def test_a_label_out_of_range_is_reported(folder):
    _, records = image_records(9)
    store = record_store(write(folder / "a", records), 9, num_classes=4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="record store: a label is out of range"):
        store.gather(tf.constant([1, 4, 2], tf.int64))


def test_a_batch_may_exceed_one_request_to_the_disk(folder):
    path = write(folder / "a", [bytes([value]) for value in range(200)])
    indices = np.random.default_rng(0).permutation(200)
    read = RecordReader(index_records([whole(path, 200)])).read(indices)
    assert read.tolist() == [bytes([value]) for value in indices]


def test_a_closing_gate_waits_for_calls_and_refuses_new_ones():
    gate, order = ExitGate(), []

    def slow():
        with gate.call():
            entered.set()
            time.sleep(0.2)
            order.append("call")

    entered = threading.Event()
    thread = threading.Thread(target=slow)
    thread.start()
    entered.wait()
    gate.close()
    order.append("closed")
    thread.join()
    assert order == ["call", "closed"]
    with pytest.raises(RuntimeError, match="exiting"), gate.call():
        pass


# The disk is so slow that reads are running when the program exits.
PROGRAM_THAT_EXITS_WHILE_IT_READS = """
import os, sys, time
import numpy as np, tensorflow as tf
from models.data.batch_stream import train_stream
from models.data.record_index import RecordRange, index_records
from models.data.record_store import RecordStore
from towers.task import InputShard

index = index_records([RecordRange(path=sys.argv[1], skip=0, take=500)])
pread = os.pread
os.pread = lambda *arguments: (time.sleep(0.002), pread(*arguments))[1]

def decode(record):
    return tf.zeros([1, 1, 1], tf.uint8), tf.constant(0, tf.int64)

store = RecordStore(
    index=index,
    decode=decode, image_shape=(1, 1, 1), num_classes=1,
)
stream = train_stream(
    lambda part: store.gather(part.indices), num_examples=500, batch_size=200, seed=0, shard=InputShard()
)
batches = iter(stream)
for _ in range(4):
    next(batches)
print("read")
"""


@pytest.mark.full
def test_a_program_can_exit_while_it_reads(folder):
    path = write(folder / "a", [b"record"] * 500)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_THAT_EXITS_WHILE_IT_READS, path],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=pathlib.Path(__file__).parents[3],
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_a_file_that_shrinks_during_training_is_reported(folder):
    path = write(folder / "a", [b"x" * 50] * 3)
    reader = RecordReader(index_records([whole(path, 3)]))
    os.truncate(path, 100)
    with pytest.raises(OSError, match="changed"):
        reader.read(np.array([2]))
