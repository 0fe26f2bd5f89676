"""When things happen in a run, as arithmetic on step numbers: nothing here knows what they are."""

import dataclasses

# A call of run_steps lasts about this long, so that the display lives and a signal is soon obeyed.
CALL_SECONDS = 0.5
MOST_STEPS_A_CALL = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """Steps at which a call of run_steps must end.

        last_step=10, periods=(4,), boundaries=(7,):    0 1 2 3|4 5 6|7|8 9|

    Attributes:
      last_step: where training ends.
      periods: something is due at every multiple of each of these.
      boundaries: and at each of these.
    """

    last_step: int
    periods: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()

    def call_length(self, step: int, wanted: int) -> int:
        """Steps of a call that begins at `step`: at most `wanted`, fewer where something is due before."""
        ends = [self.last_step]
        ends += [(step // period + 1) * period for period in self.periods]
        ends += [boundary for boundary in self.boundaries if boundary > step]
        return min(wanted, min(ends) - step)


def steps_of_a_call(seconds_a_step: float) -> int:
    """How many steps make a call of about CALL_SECONDS."""
    return int(min(max(1.0, CALL_SECONDS / max(seconds_a_step, 1e-9)), MOST_STEPS_A_CALL))


def due(step: int, *periods: int | None) -> bool:
    """Whether `step` is a multiple of one of the periods; None is never."""
    return any(period is not None and step % period == 0 for period in periods)
