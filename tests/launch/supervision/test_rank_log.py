"""The log of one process."""

import errno
import io
import pathlib

import pytest

from launch.supervision.rank_log import RankLog


class Full(io.RawIOBase):
    """A file of 10 bytes on a full disk."""

    def tell(self):
        return 10

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch):
    monkeypatch.setattr(pathlib.Path, "open", lambda path, *arguments, **named: Full())


def test_starts_are_separated(tmp_path):
    for start in (1, 2):
        with RankLog(tmp_path, "worker:1", start) as log:
            log.write(b"a line")
    first, separator, last = (tmp_path / "worker-1.log").read_text().splitlines()
    assert first == last == "a line"
    assert separator.startswith("--- start 2, ")


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path, full_disk):
    with RankLog(tmp_path, "worker:1", 2) as log:
        log.write(b"a line")
    assert list(log.tail) == ["a line"]
