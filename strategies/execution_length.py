"""How many steps one execution of a graph has: one, until they are known to be short."""

# An execution saves about 0.3 ms a step: of longer steps that is little.
_SHORT_SECONDS = 0.004
# The loop over steps is traced, in 0.3 to 1 s, only after short steps took as long.
_FIRST_SECONDS = 1.0
# A signal is handled between two executions.
_EXECUTION_SECONDS, _MOST_STEPS = 0.1, 256


class ExecutionLength:
    """The number of steps of the next executions."""

    def __init__(self, given: int | None):
        """Args:
        given: this many steps from the start; None: one, then by the time that a step takes.
        """
        self._given, self._short_seconds = given, 0.0
        self.steps = given or 1

    def note(self, num_steps: int, seconds: float) -> None:
        """Counts what some consecutive steps took."""
        if self._given is not None or not num_steps:
            return
        of_step = seconds / num_steps
        self._short_seconds = self._short_seconds + seconds if of_step <= _SHORT_SECONDS else 0.0
        is_worth_it = self._short_seconds >= _FIRST_SECONDS
        self.steps = min(_MOST_STEPS, int(_EXECUTION_SECONDS / of_step)) if is_worth_it else 1
