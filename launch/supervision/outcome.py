"""What came of a cluster, from how each of its processes ended: the root cause, the exit code, the last words.

A failure spreads: those who lose a peer end as well, and what remains is ended by the launcher. The cause is the
earliest process that ended by itself, and neither well nor for a peer's sake.
"""

import dataclasses
import signal
from collections.abc import Mapping, Sequence

from launch import binary
from launch.supervision.processes import End

_GOOD = (binary.DONE, binary.INTERRUPTED)
# A cluster that is started again with the same command meets these again.
_BEYOND_REPAIR = (binary.USER_ERROR, binary.DIFFERS, binary.NOT_FINITE, binary.INTERRUPTED)
_SHELL_SIGNAL_BASE = 128
_MEANINGS = {
    binary.USER_ERROR: "what was asked for can't be done",
    binary.DIFFERS: "--verify found a difference",
    binary.NOT_FINITE: "not finite",
    binary.PEER_LOST: "a peer was lost",
    binary.INTERRUPTED: "interrupted, everything saved",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one start of a cluster ended.

    Attributes:
      ends: of all its processes, the earliest first.
      interrupted: a signal to the launcher was passed on.
      outlived: ends of processes in whose place others were started, while the rest went on.
    """

    ends: tuple[End, ...]
    interrupted: bool
    outlived: tuple[End, ...] = ()

    @property
    def cause(self) -> End | None:
        """The process that is to blame; None if none failed."""
        by_itself = [end for end in self.ends if end.sent is None and end.code not in _GOOD]
        blamed = [
            *(end for end in by_itself if end.code != binary.PEER_LOST),
            *(end for end in self.ends if end.stood_still),
            *by_itself,
            *(end for end in self.ends if end.sent is not None and not end.asked),
        ]
        return blamed[0] if blamed else None

    @property
    def code(self) -> int:
        """The launcher's exit code: 0, 75, or the cause's; 128 + n for signal n."""
        if self.cause is not None:
            return self.cause.code if self.cause.code >= 0 else _SHELL_SIGNAL_BASE - self.cause.code
        stopped_early = any(end.sent is None and end.code == binary.INTERRUPTED for end in self.ends)
        return binary.INTERRUPTED if self.interrupted or stopped_early else binary.DONE

    @staticmethod
    def may_be_mended(end: End) -> bool:
        """Whether another process in its place may end better."""
        return end.code not in _BEYOND_REPAIR

    @property
    def can_be_mended(self) -> bool:
        """Whether another start may end better."""
        return self.cause is not None and not self.interrupted and self.code not in _BEYOND_REPAIR


def last_words(outcome: Outcome, tails: Mapping[str, Sequence[str]], logs: Mapping[str, object]) -> list[str]:
    """The lines that end a failed run: the cause with its last lines, then a line for each other process.

    Args:
      outcome: with a cause.
      tails: the last lines of each process by its name.
      logs: where the others lie.
    """
    cause = outcome.cause
    lines = [f"{cause.name} failed: {described(cause)}; its last lines, of {logs[cause.name]}:"]
    lines += [f"    {line}" for line in tails[cause.name]]
    lines += [f"{end.name}: {described(end)}" for end in outcome.ends if end is not cause]
    return lines


def described(end: End) -> str:
    """As 'exit code 5 (a peer was lost)' or 'killed by SIGTERM, sent by the launcher'."""
    if end.stood_still:
        return "it was stopped by a signal and stood still until the launcher killed it"
    if end.code < 0:
        how = f"killed by {signal.Signals(-end.code).name}"
    else:
        how = f"exit code {end.code}" + (f" ({_MEANINGS[end.code]})" if end.code in _MEANINGS else "")
    return how if end.sent is None else f"{how}, after {signal.Signals(end.sent).name} from the launcher"
