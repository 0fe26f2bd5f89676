"""Output that goes nowhere: its reader is gone, or its disk is full."""

import os


def discard_output(descriptor: int) -> None:
    """Discards what is written to an open file from now on.

    Raises:
      OSError: no file can be opened.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)
