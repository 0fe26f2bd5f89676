"""Mechanisms on the devices of one process. Knows tensors and device names: no cluster, flags or files."""

from towers.devices import Devices, configure_devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Batch, InputShard, Task, WeightedLoss, WeightedValue

__all__ = [
    "Batch",
    "Devices",
    "InputShard",
    "StepOptions",
    "Task",
    "UserError",
    "WeightedLoss",
    "WeightedValue",
    "configure_devices",
]
