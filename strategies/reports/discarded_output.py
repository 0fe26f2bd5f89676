"""Discards output whose reader is gone, or whose disk is full."""

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO


def discard_output(descriptor: int) -> None:
    """Discards what is written to an open file from now on.

    Raises:
      OSError: the null device can't be opened.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)


@contextlib.contextmanager
def discarded_without_reader(stream: TextIO) -> Iterator[None]:
    """Context manager: discards the output if its reader is gone, for example a `| tee` after Ctrl-C."""
    try:
        yield
    except OSError:
        discard_output(stream.fileno())
