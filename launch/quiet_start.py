"""TensorFlow without its start-up notices, so that what a program prints is what it has to say."""

import os
import sys
import tempfile

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def import_tensorflow_quietly() -> None:
    """Imports TensorFlow and looks for GPUs with stderr set aside; all of it is printed if that fails.

    TensorFlow 2.21 writes some notices before it reads its own log level, so that alone does not silence it.
    Whoever sets TF_CPP_MIN_LOG_LEVEL to 0 or 1 wants to see them, and nothing is set aside.
    """
    if os.environ.setdefault(_LEVEL, "2") in ("0", "1") or "tensorflow" in sys.modules:
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        except BaseException:
            aside.seek(0)
            os.write(saved, aside.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
