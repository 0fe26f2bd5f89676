"""How many steps one execution of a graph has: one, until steps are known to be short."""

# Several steps per execution save about 0.3 ms a step: little for steps longer than this.
_SHORT_SECONDS = 0.004
# Several steps need another trace, in 0.1 to 1 s: about what this many steps would have saved.
_FIRST_STEPS = 2000
# Limits of an execution, because a signal is handled only between executions.
_EXECUTION_SECONDS, _MOST_STEPS = 0.1, 256


class ExecutionLength:
    """The number of steps of the next executions."""

    def __init__(self, given: int | None):
        """Args:
        given: number of steps from the start; None: one, later chosen by the time of a step.
        """
        self._given, self._num_short = given, 0
        self.steps = given or 1

    def note(self, num_steps: int, seconds: float) -> None:
        """Counts consecutive steps, and the seconds that they took."""
        if self._given is not None or not num_steps:
            return
        of_step = max(seconds / num_steps, 1e-9)
        self._num_short = self._num_short + num_steps if of_step <= _SHORT_SECONDS else 0
        is_worth_it = self._num_short >= _FIRST_STEPS
        self.steps = min(_MOST_STEPS, int(_EXECUTION_SECONDS / of_step)) if is_worth_it else 1
