"""The same names for the layers of a model however many models a process built before.

Keras numbers unnamed layers by process: the second model's first Dense is `dense_1`. Checkpoints are keyed by
these names, so a model is built with the count begun anew.
"""

import collections
import contextlib

from keras.src.backend.common import global_state

_COUNTS = "object_name_uids"


@contextlib.contextmanager
def counted_anew():
    """Within, Keras names unnamed layers as if no model had been built before; its own count goes on after."""
    before = global_state.get_global_attribute(_COUNTS)
    global_state.set_global_attribute(_COUNTS, collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTS, before)
