"""Carries the lines of many processes to a screen and to their logs, as they come."""

import dataclasses
import os
import selectors
from collections.abc import Mapping
from typing import IO

from launch.supervision.rank_log import RankLog
from launch.supervision.screen import Screen

_CHUNK_BYTES = 1 << 16
# What never ends its line is passed on in pieces, and not kept in memory for ever.
_LONGEST_LINE_BYTES = 1 << 16


@dataclasses.dataclass
class _Source:
    """One stream of one process, and what came of a line that has not ended yet."""

    name: str
    is_error: bool
    begun: bytes = b""

    def lines(self, chunk: bytes) -> list[bytes]:
        """The lines that end with this chunk; an empty chunk is the stream's end, and ends the last line."""
        *whole, self.begun = (self.begun + chunk).split(b"\n")
        if self.begun and (not chunk or len(self.begun) > _LONGEST_LINE_BYTES):
            whole.append(self.begun)
            self.begun = b""
        return whole


class LineRelay:
    """Reads whatever stream has something to say. Needs no thread."""

    def __init__(self, screen: Screen, logs: Mapping[str, RankLog]):
        """Args:
        screen: gets every line.
        logs: by the process's name; gets its lines.
        """
        self._screen, self._logs = screen, logs
        self._streams = selectors.DefaultSelector()

    def add(self, name: str, output: IO[bytes], error: IO[bytes]) -> None:
        """From now on reads these two streams of a process."""
        for stream, is_error in ((output, False), (error, True)):
            self._streams.register(stream, selectors.EVENT_READ, _Source(name, is_error))

    def pass_on(self, wait_seconds: float) -> bool:
        """Passes on what there is; waits for something at most so long. False when nothing came."""
        ready = self._streams.select(wait_seconds)
        for key, _ in ready:
            chunk = os.read(key.fd, _CHUNK_BYTES)
            self._write(key.data, chunk)
            if not chunk:
                self._streams.unregister(key.fileobj)
        return bool(ready)

    @property
    def reads(self) -> bool:
        """Whether any stream is open."""
        return bool(self._streams.get_map())

    def close(self) -> None:
        """Ends the lines that have not ended."""
        for key in list(self._streams.get_map().values()):
            self._write(key.data, b"")
        self._streams.close()

    def _write(self, source: _Source, chunk: bytes) -> None:
        for line in source.lines(chunk):
            self._logs[source.name].write(line)
            self._screen.line(source.name, line, is_error=source.is_error)
