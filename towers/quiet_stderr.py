"""Hides what C++ libraries print while they load or look for devices. Importing it does not import TensorFlow."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def stderr_aside() -> Iterator[None]:
    """Context manager: what is written to stderr is printed only if the body fails."""
    with tempfile.TemporaryFile() as aside:
        sys.stderr.flush()
        saved = os.dup(2)
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
