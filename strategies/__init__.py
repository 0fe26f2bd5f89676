"""Who cooperates: one file a mode behind one contract, and the Trainer that drives any of them."""

from strategies.callbacks import Callback
from strategies.contract import NonFiniteStep, StepReport, Strategy
from strategies.registry import build_strategy
from strategies.trainer import Trainer
from strategies.trainer_options import TrainerOptions

__all__ = [
    "Callback",
    "NonFiniteStep",
    "StepReport",
    "Strategy",
    "Trainer",
    "TrainerOptions",
    "build_strategy",
]
