"""The steps at which evaluations, checkpoints and reports are due, as arithmetic on step counts."""

import dataclasses

# Target duration of a call of run_steps, so that the display is updated and a signal is handled soon.
CALL_SECONDS = 0.5
MOST_STEPS_A_CALL = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """The steps at which a call of `run_steps` must end.

        last_step=10, periods=(4,), boundaries=(7,):    0 1 2 3|4 5 6|7|8 9|

    Attributes:
      last_step: number of steps after which training ends.
      periods: calls end at every multiple of each of these numbers of steps.
      boundaries: calls end at each of these steps.
    """

    last_step: int
    periods: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()

    def call_length(self, step: int, wanted: int) -> int:
        """Number of steps of a call that starts at `step`: `wanted`, or fewer if the call must end before."""
        return min(wanted, self.next_end(step) - step)

    def next_end(self, step: int) -> int:
        """The step at which a call that starts at `step` must end."""
        ends = [self.last_step]
        ends += [(step // period + 1) * period for period in self.periods]
        ends += [boundary for boundary in self.boundaries if boundary > step]
        return min(ends)


def steps_of_a_call(seconds_a_step: float) -> int:
    """Number of steps that take about CALL_SECONDS, from 1 to MOST_STEPS_A_CALL."""
    return int(min(max(1.0, CALL_SECONDS / max(seconds_a_step, 1e-9)), MOST_STEPS_A_CALL))


def due(before: int, step: int, *periods: int | None) -> bool:
    """Whether a multiple of one of the periods is in before + 1 .. step; a period of None is never due."""
    return any(period is not None and step // period > before // period for period in periods)
