# The public names by their homes: type checkers read them here, and so does __init__.py.
from .callbacks import Callback as Callback
from .contract import StepReport as StepReport
from .contract import Strategy as Strategy
from .errors import NonFiniteStep as NonFiniteStep
from .registry import build_strategy as build_strategy
from .training.trainer import Trainer as Trainer
from .training.trainer_options import TrainerOptions as TrainerOptions
