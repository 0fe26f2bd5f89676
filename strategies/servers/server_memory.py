"""Checks that servers have the memory for their pieces before values are sent; otherwise Linux would kill them."""

from collections.abc import Mapping

import psutil
import tensorflow as tf

from towers.errors import UserError
from towers.hardware.control_groups import memory_left


def free_bytes() -> int:
    """Bytes of memory that this process can still get, by the machine and by the limits of its control groups."""
    free, left = psutil.virtual_memory().available, memory_left()
    return free if left is None else min(free, left)


def variable_bytes(variable: tf.Variable) -> int:
    """Bytes of a variable's value."""
    return variable.shape.num_elements() * variable.dtype.size


def check_memory(needed_bytes: int, free: Mapping[str, int]) -> None:
    """Raises UserError if a server has less memory than its piece needs.

    Args:
      needed_bytes: bytes of the parameters and slots of one server.
      free: bytes that each server can still get, by its name.
    """
    for name, available in free.items():
        if available < needed_bytes:
            raise UserError(
                f"{name} can get {_gib(available)} more memory, and its part of parameters and slots takes "
                f"{_gib(needed_bytes)}: start more servers, or use an optimizer with fewer slots"
            )


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
