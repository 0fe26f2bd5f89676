"""The same names for a model's layers, however many models the process has built before.

Keras numbers unnamed layers over the whole process: the second model's first Dense is `dense_1`. Checkpoints use
these names as keys, so each model is built with counts that start at 0.
"""

import collections
import contextlib

from keras.src.backend.common import global_state

_COUNTS = "object_name_uids"


@contextlib.contextmanager
def fresh_name_counts():
    """Context manager: Keras names unnamed layers as in a new process. At the end its counts are restored."""
    before = global_state.get_global_attribute(_COUNTS)
    global_state.set_global_attribute(_COUNTS, collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTS, before)
