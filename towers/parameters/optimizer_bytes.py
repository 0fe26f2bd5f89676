"""How much optimizer state each device has, as a line for the user."""

from collections.abc import Mapping, Sequence

import tensorflow as tf


def notice_of(slots: Mapping[str, Sequence[tf.Variable]]) -> str:
    """'optimizer state: 1,200 bytes on cpu:0, 1,180 on cpu:1'.

    Args:
      slots: the slots on each device, by the device's name.
    """
    held = {device: sum(_bytes(variable) for variable in own) for device, own in slots.items()}
    first, *others = [
        f"{count:,}{{}} on {device.rpartition('/device:')[2].lower()}" for device, count in held.items()
    ]
    return "optimizer state: " + ", ".join([first.format(" bytes"), *(other.format("") for other in others)])


def _bytes(variable: tf.Variable) -> int:
    return variable.dtype.size * variable.shape.num_elements()
