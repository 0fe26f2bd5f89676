"""Gives a process whose caller closed stdout or stderr (`2>&-`, some daemons) the null device in their place.

Python has None for such a stream, and the next file that is opened gets its number: C++ libraries would write
their messages into a checkpoint.
"""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Opens the null device for each of stdin, stdout and stderr that is closed."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            # The lowest free number, so the stream's own, unless a file got it in the meantime.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, null == number)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))
