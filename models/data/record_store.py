"""Images that are read from their record files by number: for sets that do not fit in memory."""

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
# Records that are asked of the disk together, and files that are open at once for one reader.
_READ_AT_ONCE = 64


class ExitGate:
    """Lets no call into Python begin while the interpreter ends, and waits for those that run.

    tf.data calls Python from threads of its own. One that comes while the interpreter is finalised is
    stopped for ever, and the destructor of its iterator waits for it: the program would hang at its end.
    After the gate is closed calls fail at once, which fills the stream's buffer with errors; then none comes.
    """

    _QUIET_SECONDS, _PATIENCE_SECONDS = 0.05, 5.0

    def __init__(self):
        self._lock = threading.Lock()
        self._is_closed, self._num_running, self._last_call = False, 0, 0.0
        atexit.register(self.close)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around each call.

        Raises:
          RuntimeError: the gate is closed.
        """
        with self._lock:
            self._last_call = time.monotonic()
            if self._is_closed:
                raise RuntimeError("the program is ending")
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                self._last_call = time.monotonic()

    def close(self) -> None:
        """Closes the gate, and comes back when no call has been tried for a moment."""
        with self._lock:
            self._is_closed = True
        give_up = time.monotonic() + self._PATIENCE_SECONDS
        while time.monotonic() < give_up and not self._is_quiet():
            time.sleep(self._QUIET_SECONDS / 5)

    def _is_quiet(self) -> bool:
        with self._lock:
            return not self._num_running and time.monotonic() - self._last_call > self._QUIET_SECONDS


class RecordReader:
    """Reads records by number; safe to call from several threads: a pread needs no lock and no seek."""

    def __init__(self, index: RecordIndex):
        self._index = index
        self._gate = ExitGate()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The records' bytes, object [n], for int64 [n] numbers."""
        records = np.empty(len(numbers), object)
        with self._gate.call():
            for start in range(0, len(numbers), _READ_AT_ONCE):
                some = numbers[start : start + _READ_AT_ONCE].tolist()
                records[start : start + len(some)] = self._read_some(some)
        return records

    def _read_some(self, numbers: list[int]) -> list[bytes]:
        index = self._index
        places = [(index.files[n], int(index.offsets[n]), int(index.lengths[n])) for n in numbers]
        # Files are opened each time: a set may have more of them than a process may hold open.
        with contextlib.ExitStack() as stack:
            opened = {
                file: stack.enter_context(open(index.paths[file], "rb", buffering=0)).fileno()
                for file in {file for file, _, _ in places}
            }
            # The disk works on all of them at once while the first is waited for. (macOS has no such call.)
            if hasattr(os, "posix_fadvise"):
                for file, offset, length in places:
                    os.posix_fadvise(opened[file], offset, length, os.POSIX_FADV_WILLNEED)
            records = [os.pread(opened[file], length, offset) for file, offset, length in places]
        for record, (file, offset, length) in zip(records, places, strict=True):
            if len(record) != length:
                raise OSError(f"{index.paths[file]}: changed while in use: the record at byte {offset} is gone")
        return records


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordStore:
    """Has the face of `models.data.image_store.Store` over records on disk. Reads in the process that made it.

    Attributes:
      index: where the records are.
      decode: one record, a string scalar, to (image uint8 [H, W, C], label int64), in a graph.
      image_shape: (H, W, C).
      num_classes: labels are 0 .. num_classes - 1, checked at each read.
      name: how messages call the set.
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
        """As `models.data.image_store.Store.gather`."""
        indices = tf.convert_to_tensor(indices)
        records = tf.ensure_shape(tf.numpy_function(self._reader.read, [indices], tf.string), indices.shape)
        images, labels = tf.map_fn(
            self.decode,
            records,
            parallel_iterations=_DECODED_AT_ONCE,
            fn_output_signature=(tf.TensorSpec(self.image_shape, tf.uint8), tf.TensorSpec([], tf.int64)),
        )
        # Refused in the graph: the fewer calls into Python, the better.
        is_known = tf.reduce_all((labels >= 0) & (labels < self.num_classes))
        complaint = (
            f"{self.name}: a label is out of range: {self.num_classes} classes are numbered "
            f"0 to {self.num_classes - 1}; prepare the set again. Labels and their examples:"
        )
        with tf.control_dependencies([tf.debugging.Assert(is_known, [complaint, labels, indices], summarize=-1)]):
            return tf.ensure_shape(images, [None, *self.image_shape]), tf.identity(labels)
