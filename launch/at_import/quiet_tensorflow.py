"""Hides TensorFlow's start-up notices, so that a program prints only its own lines."""

import contextlib
import importlib
import logging
import os
import types
from collections.abc import Iterator

from launch.at_import.around_import import around_import

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_XLA_FLAGS = "TF_XLA_FLAGS"


def keep_tensorflow_quiet() -> None:
    """Hides the notices that TensorFlow prints while it is imported, whichever module imports it first.

    Does not import TensorFlow: a launcher that only starts other programs needs little memory.
    Does nothing if TF_CPP_MIN_LOG_LEVEL is 0 or 1, which asks for the notices.
    """
    if os.environ.setdefault(_LEVEL, "2") in ("0", "1"):
        return
    # absl's app.run shows notices that TensorFlow logs from Python, such as "Reduce to ..." of MirroredStrategy.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    around_import("tensorflow", _quiet)


@contextlib.contextmanager
def _quiet(tensorflow: types.ModuleType) -> Iterator[None]:
    """Context manager around the import: stderr goes to a file, whose text is printed only if the import fails."""
    # Imported here, when it is used: `launch` alone imports little.
    quiet_stderr = importlib.import_module("towers.quiet_stderr")
    with quiet_stderr.stderr_aside():
        yield
    if os.environ.get(_XLA_FLAGS):
        # Reads the variable. A flag in it that TensorFlow does not know ends the process, with a line on stderr.
        importlib.import_module("tensorflow.python.client.pywrap_tf_session").TF_GetXlaConstantFoldingDisabled()
    # TensorFlow 2.21 prints some notices before it reads its log level, others when it looks for GPUs.
    with quiet_stderr.stderr_aside():
        tensorflow.config.list_physical_devices()
