"""How a run ends before its end, through nobody's mistake; who catches these need not import TensorFlow."""


class NonFiniteStep(ArithmeticError):
    """Training stopped at a step whose loss or gradients were not finite; its update was not applied.

    Attributes:
      step: number of the step, counted from 0.
    """

    def __init__(self, message: str, *, step: int):
        super().__init__(message)
        self.step = step


class PeerLost(RuntimeError):
    """Another process of this run is gone or does not answer: this one can't go on without it."""
