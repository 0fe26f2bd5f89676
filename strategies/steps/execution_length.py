"""How many steps one execution of a graph has: one, until they are known to be short."""

# An execution saves about 0.3 ms a step: of longer steps that is little.
_SHORT_SECONDS = 0.004
# Several steps are traced again, in 0.1 to 1 s: about what so many executions would have saved by then.
_FIRST_STEPS = 2000
# A signal is handled between two executions.
_EXECUTION_SECONDS, _MOST_STEPS = 0.1, 256


class ExecutionLength:
    """The number of steps of the next executions."""

    def __init__(self, given: int | None):
        """Args:
        given: this many steps from the start; None: one, then by the time that a step takes.
        """
        self._given, self._num_short = given, 0
        self.steps = given or 1

    def note(self, num_steps: int, seconds: float) -> None:
        """Counts some consecutive steps, which took so long."""
        if self._given is not None or not num_steps:
            return
        of_step = max(seconds / num_steps, 1e-9)
        self._num_short = self._num_short + num_steps if of_step <= _SHORT_SECONDS else 0
        is_worth_it = self._num_short >= _FIRST_STEPS
        self.steps = min(_MOST_STEPS, int(_EXECUTION_SECONDS / of_step)) if is_worth_it else 1
