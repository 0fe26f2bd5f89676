"""Passes the output lines of several processes on to a screen and to their logs, as they arrive."""

import dataclasses
import os
import selectors
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO

from launch.supervision.rank_log import RankLog
from launch.supervision.screen import Screen

_CHUNK_BYTES = 1 << 16
# A longer line is passed on in pieces, so that memory stays bounded.
_LONGEST_LINE_BYTES = 1 << 16


@dataclasses.dataclass
class _Source:
    """One stream of one process.

    Attributes:
      name: the process.
      is_error: whether it is the standard error.
      begun: the beginning of a line that has not ended yet.
    """

    name: str
    is_error: bool
    begun: bytes = b""

    def lines(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk. An empty chunk is the end of the stream, which ends the last line."""
        *whole, self.begun = (self.begun + chunk).split(b"\n")
        if self.begun and (not chunk or len(self.begun) > _LONGEST_LINE_BYTES):
            whole.append(self.begun)
            self.begun = b""
        return whole


class LineRelay:
    """Reads whichever streams have output. Needs no thread."""

    def __init__(self, screen: Screen, logs: Mapping[str, RankLog] = MappingProxyType({})):
        """Args:
        screen: gets every line.
        logs: by the name of a process, the log that gets its lines.
        """
        self._screen, self._logs = screen, logs
        self._streams = selectors.DefaultSelector()

    def add(self, name: str, output: IO[bytes], error: IO[bytes]) -> None:
        """Adds the two streams of a process."""
        for stream, is_error in ((output, False), (error, True)):
            self._streams.register(stream, selectors.EVENT_READ, _Source(name, is_error))

    def pass_on(self, wait_seconds: float) -> bool:
        """Passes on the available output; waits at most `wait_seconds` for some. Returns whether there was any."""
        ready = self._streams.select(wait_seconds)
        for key, _ in ready:
            chunk = os.read(key.fd, _CHUNK_BYTES)
            self._write(key.data, chunk)
            if not chunk:
                self._streams.unregister(key.fileobj)
                # A worker may be replaced many times: its pipes must not stay until the end of the run.
                key.fileobj.close()
        return bool(ready)

    @property
    def reads(self) -> bool:
        """Whether any stream is open."""
        return bool(self._streams.get_map())

    def close(self) -> None:
        """Passes on the lines that have not ended, then stops reading."""
        for key in list(self._streams.get_map().values()):
            self._write(key.data, b"")
        self._streams.close()

    def _write(self, source: _Source, chunk: bytes) -> None:
        for line in source.lines(chunk):
            if source.name in self._logs:
                self._logs[source.name].write(line)
            self._screen.line(source.name, line, is_error=source.is_error)
