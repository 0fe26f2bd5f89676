"""Errors that end a run early and are not mistakes of the user. Importing them does not import TensorFlow."""


class NonFiniteStep(ArithmeticError):
    """Training stopped at a step whose loss or gradients were not finite; its update was not applied.

    Attributes:
      step: index of the step.
    """

    def __init__(self, message: str, *, step: int):
        super().__init__(message)
        self.step = step


class PeerLost(RuntimeError):
    """Another process of this run has ended or does not reply, and this process can't continue without it."""
