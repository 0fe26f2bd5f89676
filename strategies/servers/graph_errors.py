"""A user's mistake that was found inside a graph, perhaps in another process."""

import re

import tensorflow as tf

from towers.errors import UserError


def user_error_in(error: tf.errors.OpError) -> UserError | None:
    """The UserError whose text is in TensorFlow's error: a host function raised it, or an assertion named it."""
    found = re.search(r"UserError: ([^\]\n]*)", str(error))
    return None if found is None else UserError(found.group(1))
