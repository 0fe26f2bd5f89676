# The public names by their homes: type checkers read them here, and so does __init__.py.
from .device_setup import configure_devices as configure_devices
from .devices import Devices as Devices
from .errors import UserError as UserError
from .options import StepOptions as StepOptions
from .task import Batch as Batch
from .task import InputShard as InputShard
from .task import Task as Task
from .task import WeightedLoss as WeightedLoss
from .task import WeightedValue as WeightedValue

__version__: str
