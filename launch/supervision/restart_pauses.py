"""How long the launcher waits before a restart, so that restarts outlast the cause of a failure.

failures in a row   1  2  3  4   5   6 and more
pause in seconds    0  2  4  8  16  30

After a first failure the restart is immediate. A failure that follows soon probably has the same cause, which may
last for some time: a full disk, a port or a GPU that another program still holds.
"""

_PAUSES_SECONDS = (0, 2, 4, 8, 16, 30)
# Longer than most programs take to import, compile and begin to train.
STABLE_SECONDS = 120.0


class RestartPauses:
    """The pauses before the restarts of one process, or of a whole cluster."""

    def __init__(self):
        self._in_a_row = 0

    def after(self, *, lived_seconds: float) -> int:
        """Seconds to wait before the restart that follows this failure.

        Args:
          lived_seconds: seconds from the start to the failure. From `STABLE_SECONDS` on no earlier failure counts.
        """
        if lived_seconds >= STABLE_SECONDS:
            self._in_a_row = 0
        self._in_a_row += 1
        return _PAUSES_SECONDS[min(self._in_a_row, len(_PAUSES_SECONDS)) - 1]
