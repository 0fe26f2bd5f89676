"""Images that are read from their record files by number: for sets that do not fit in memory."""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from models.image_store import check_labels
from models.record_index import RecordIndex

_DECODED_AT_ONCE = 16


class RecordReader:
    """Reads records by number, with threads; safe to call from several threads at once.

    A file is opened for each record: a set may have more files than a process may hold open.
    """

    def __init__(self, index: RecordIndex, *, num_threads: int):
        self._index = index
        self._num_threads = num_threads
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, "record-reader")

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The records' bytes, object [n], for int64 [n] numbers."""
        records = np.empty(len(numbers), object)
        parts = np.array_split(numbers, self._num_threads)
        place = 0
        for part in self._threads.map(self._read_some, parts):
            records[place : place + len(part)] = part
            place += len(part)
        return records

    def _read_some(self, numbers: np.ndarray) -> list[bytes]:
        return [self._read_one(number) for number in numbers.tolist()]

    def _read_one(self, number: int) -> bytes:
        index = self._index
        path, length = index.paths[index.files[number]], int(index.lengths[number])
        with open(path, "rb", buffering=0) as file:
            record = os.pread(file.fileno(), length, int(index.offsets[number]))
        if len(record) != length:
            raise OSError(f"{path}: changed while it was read: record {number} is not there any more")
        return record


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordStore:
    """Has the face of `models.image_store.Store` over records on disk. Reads in the process that made it.

    Attributes:
      index: where the records are.
      decode: one record, a string scalar, to (image uint8 [H, W, C], label int64), in a graph.
      image_shape: (H, W, C).
      num_classes: labels are 0 .. num_classes - 1, checked at each read.
      name: how messages call the set.
      num_threads: records that are read at once.
    """

    index: RecordIndex
    decode: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    image_shape: tuple[int, int, int]
    num_classes: int
    name: str = "record store"
    num_threads: int = 8

    @property
    def num_examples(self) -> int:
        return len(self.index)

    @functools.cached_property
    def _reader(self) -> RecordReader:
        return RecordReader(self.index, num_threads=self.num_threads)

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As `models.image_store.Store.gather`."""
        indices = tf.convert_to_tensor(indices)
        records = tf.ensure_shape(tf.numpy_function(self._reader.read, [indices], tf.string), indices.shape)
        images, labels = tf.map_fn(
            self.decode,
            records,
            parallel_iterations=_DECODED_AT_ONCE,
            fn_output_signature=(tf.TensorSpec(self.image_shape, tf.uint8), tf.TensorSpec([], tf.int64)),
        )
        labels = tf.ensure_shape(tf.numpy_function(self._checked, [labels, indices], tf.int64), indices.shape)
        return tf.ensure_shape(images, [None, *self.image_shape]), labels

    def _checked(self, labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        check_labels(self.name, labels, self.num_classes, numbers=numbers)
        return labels
