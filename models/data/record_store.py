"""Images that are read by index from TFRecord files: for sets that do not fit in memory."""

import atexit
import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from models.data.record_index import RecordIndex

_DECODED_AT_ONCE = 16
# Records that are requested from the disk at once, and so the maximum number of files that a read has open.
_READ_AT_ONCE = 64


class ExitGate:
    """Refuses calls into Python once the interpreter exits, and waits for the calls that are running.

    tf.data calls Python from its own threads. A thread that makes such a call while the interpreter is finalised
    blocks forever, and the destructor of its iterator waits for it: the program would hang at its exit. Once the
    gate is closed, calls fail at once. The errors fill the stream's buffer, and then tf.data makes no more calls.
    """

    # Without a call for `_QUIET_SECONDS`, no more calls are expected; `close` waits at most `_TIMEOUT_SECONDS`.
    _QUIET_SECONDS, _TIMEOUT_SECONDS = 0.05, 5.0

    def __init__(self):
        self._lock = threading.Lock()
        self._is_closed, self._num_running, self._last_call = False, 0, 0.0
        atexit.register(self.close)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Context manager: counts one call as running.

        Raises:
          RuntimeError: the gate is closed.
        """
        with self._lock:
            self._last_call = time.monotonic()
            if self._is_closed:
                raise RuntimeError("the program is exiting: no more records are read")
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                self._last_call = time.monotonic()

    def close(self) -> None:
        """Closes the gate, and returns when no call runs and none was made for `_QUIET_SECONDS`."""
        with self._lock:
            self._is_closed = True
        deadline = time.monotonic() + self._TIMEOUT_SECONDS
        while time.monotonic() < deadline and not self._is_quiet():
            time.sleep(self._QUIET_SECONDS / 5)

    def _is_quiet(self) -> bool:
        with self._lock:
            return not self._num_running and time.monotonic() - self._last_call > self._QUIET_SECONDS


class RecordReader:
    """Reads records by index. Several threads may read at the same time: pread needs no lock and no seek."""

    def __init__(self, index: RecordIndex):
        self._index = index
        self._gate = ExitGate()

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Bytes objects [n]: the data of the records at `indices` int64 [n]."""
        records = np.empty(len(indices), object)
        with self._gate.call():
            for start in range(0, len(indices), _READ_AT_ONCE):
                some = indices[start : start + _READ_AT_ONCE].tolist()
                records[start : start + len(some)] = self._read_some(some)
        return records

    def _read_some(self, indices: list[int]) -> list[bytes]:
        index = self._index
        extents = [(index.files[i], int(index.offsets[i]), int(index.lengths[i])) for i in indices]
        # Opens the files at each read: a set may have more files than a process may keep open.
        with contextlib.ExitStack() as stack:
            opened = {
                file: stack.enter_context(open(index.paths[file], "rb", buffering=0)).fileno()
                for file in {file for file, _, _ in extents}
            }
            # Lets the disk fetch all records at once while this waits for the first. (macOS has no such call.)
            if hasattr(os, "posix_fadvise"):
                for file, offset, length in extents:
                    os.posix_fadvise(opened[file], offset, length, os.POSIX_FADV_WILLNEED)
            records = [os.pread(opened[file], length, offset) for file, offset, length in extents]
        for record, (file, offset, length) in zip(records, extents, strict=True):
            if len(record) != length:
                raise OSError(f"{index.paths[file]}: changed during training: the record at byte {offset} is gone")
        return records


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordStore:
    """Implements `models.data.image_store.Store` over records on disk. Only the process that created it can read.

    Attributes:
      index: files and offsets of the records.
      decode: function in a graph from a record, a string scalar, to (image uint8 [H, W, C], label int64).
      image_shape: (H, W, C).
      num_classes: labels are 0 .. num_classes - 1, checked at each read.
      name: name of the set in messages.
    """

    index: RecordIndex
    decode: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    image_shape: tuple[int, int, int]
    num_classes: int
    name: str = "record store"

    @property
    def num_examples(self) -> int:
        return len(self.index)

    @functools.cached_property
    def _reader(self) -> RecordReader:
        return RecordReader(self.index)

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `models.data.image_store.Store.gather`."""
        indices = tf.convert_to_tensor(indices)
        records = tf.ensure_shape(tf.numpy_function(self._reader.read, [indices], tf.string), indices.shape)
        images, labels = tf.map_fn(
            self.decode,
            records,
            parallel_iterations=_DECODED_AT_ONCE,
            fn_output_signature=(tf.TensorSpec(self.image_shape, tf.uint8), tf.TensorSpec([], tf.int64)),
        )
        # Checked in the graph, to call into Python as little as possible.
        is_known = tf.reduce_all((labels >= 0) & (labels < self.num_classes))
        complaint = (
            f"{self.name}: a label is out of range: with {self.num_classes} classes, labels are "
            f"0 to {self.num_classes - 1}; prepare the set again. Labels and indices of their examples:"
        )
        with tf.control_dependencies([tf.debugging.Assert(is_known, [complaint, labels, indices], summarize=-1)]):
            return tf.ensure_shape(images, [None, *self.image_shape]), tf.identity(labels)
