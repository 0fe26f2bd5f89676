"""The log of one process: all its lines in a file, and the last ones in memory."""

import collections
import contextlib
import datetime
import pathlib

from towers.errors import UserError

_LAST_LINES = 15


class RankLog:
    """Appends to `FOLDER/worker-1.log`, with a separator line between one start of the process and the next.

    Attributes:
      path: the file.
      tail: the last lines.
    """

    def __init__(self, folder: pathlib.Path, name: str, start: int):
        """Args:
        folder: the folder of the logs; created if missing.
        name: the process, as 'worker:1'.
        start: number of this start of the cluster, from 1.

        Raises:
          UserError: the file can't be written.
        """
        self.path = folder / f"{name.replace(':', '-')}.log"
        self.tail: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"{self.path}: can't write a log there ({error.strerror}); give another --directory"
            ) from error
        if self._file.tell() > 0:
            now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            self._append(f"--- start {start}, {now} ---\n".encode())

    def write(self, line: bytes) -> None:
        """Writes a line, given without its newline."""
        self.tail.append(line.decode(errors="replace"))
        self._append(line + b"\n")

    def _append(self, text: bytes) -> None:
        # A full disk ends the log, not the training.
        with contextlib.suppress(OSError):
            self._file.write(text)

    def __enter__(self) -> "RankLog":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
