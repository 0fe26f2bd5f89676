"""Hides what C++ libraries print while they load or look for devices. Importing it does not import TensorFlow."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def stderr_aside() -> Iterator[None]:
    """Context manager: holds back what is written to stderr, and prints it only if the body fails.

    Does nothing if stderr is closed.
    """
    try:
        saved = os.dup(2)
    except OSError:
        yield
        return
    with tempfile.TemporaryFile() as aside:
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException:
            aside.seek(0)
            os.write(saved, aside.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
