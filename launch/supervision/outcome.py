"""The outcome of a cluster, from the exits of its processes: root cause, exit code and last messages.

A failure spreads: processes that lose a peer end as well, and the launcher ends the remaining ones. The cause is
the first process that ended by itself, neither successfully nor because it lost a peer. A process that
the user's signal killed while it was starting had nothing to save and did not fail. If only one process was told
to stop, those that lost it did not fail either: a restart would continue a run that was meant to stop.
"""

import dataclasses
import signal
from collections.abc import Mapping, Sequence

from launch import binary
from launch.supervision.processes import Exit
from strategies.training.stop_signals import SHELL_SIGNAL_BASE

_GOOD = (binary.DONE, binary.INTERRUPTED)
# A restart with the same command would end with these codes again.
_NOT_RESTARTED = (binary.USER_ERROR, binary.DIFFERS, binary.NOT_FINITE, binary.INTERRUPTED)
_MEANINGS = {
    binary.USER_ERROR: "a user error",
    binary.DIFFERS: "--verify found a difference",
    binary.NOT_FINITE: "a loss or gradient was not finite",
    binary.PEER_LOST: "a peer was lost",
    binary.INTERRUPTED: "interrupted, everything saved",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one start of a cluster ended.

    Attributes:
      exits: the exits of all its processes, the earliest first.
      interrupted: the launcher received a signal and forwarded it.
      replaced: the exits of processes that were replaced while the rest of the cluster went on.
      awaited: by the name of each process that serves, the processes that it serves.
      followed: by the name of each process that no other one needs, an evaluator, the processes that it follows.
    """

    exits: tuple[Exit, ...]
    interrupted: bool
    replaced: tuple[Exit, ...] = ()
    awaited: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    followed: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def cause(self) -> Exit | None:
        """The exit of the process that caused the failure; None if no process failed."""
        needed = [each for each in self._failed if not self._is_outlived(each)]
        # The loss of a process that no other one needs causes nothing.
        needed.sort(key=lambda each: each.name in self.followed and self.is_loss(each))
        return needed[0] if needed else None

    @property
    def lost(self) -> list[Exit]:
        """Exits of processes that failed although all that they served ended well; [] if there is a `cause`."""
        return [each for each in self._failed if self._is_outlived(each)] if self.cause is None else []

    @property
    def _failed(self) -> list[Exit]:
        """The exits of processes that did not end well, the likeliest cause first, each once."""
        by_itself = [
            each
            for each in self.exits
            if each.sent is None and each.code not in _GOOD and not each.was_interrupted
        ]
        found = [
            *(each for each in by_itself if each.code != binary.PEER_LOST),
            *(each for each in self.exits if each.was_stopped),
            *(by_itself if self.interrupted or not self._stopped_early else ()),
            *(each for each in self.exits if each.sent is not None and not each.was_asked),
        ]
        return list(dict.fromkeys(found))

    def _is_outlived(self, failed: Exit) -> bool:
        """Whether all processes that it served ended well by themselves, for example the chief of a lost worker.

        For a lost process that served none, whether those that it followed did.
        """
        followed = self.followed.get(failed.name, ()) if self.is_loss(failed) else ()
        served = self.awaited.get(failed.name, followed)
        well = {each.name for each in self.exits if each.sent is None and each.code in _GOOD}
        return bool(served) and well.issuperset(served)

    @property
    def code(self) -> int:
        """The launcher's exit code: 0, 75, or that of the cause; 128 + n for signal n."""
        if self.cause is not None:
            return self.cause.code if self.cause.code >= 0 else SHELL_SIGNAL_BASE - self.cause.code
        return binary.INTERRUPTED if self.interrupted or self._stopped_early else binary.DONE

    @property
    def _stopped_early(self) -> bool:
        """Whether a process ended because of a signal, which the launcher may not have received."""
        return any(each.sent is None and each.code == binary.INTERRUPTED for each in self.exits)

    @staticmethod
    def is_loss(failed: Exit) -> bool:
        """Whether a process that failed was killed, or cut off from the others. An error is no loss."""
        return failed.code < 0 or failed.code == binary.PEER_LOST

    @staticmethod
    def may_be_replaced(failed: Exit) -> bool:
        """Whether a replacement for this process may succeed."""
        return failed.code not in _NOT_RESTARTED

    @property
    def may_be_restarted(self) -> bool:
        """Whether the cluster failed and a restart may succeed."""
        return self.cause is not None and not self.interrupted and self.code not in _NOT_RESTARTED


def failure_report(outcome: Outcome, tails: Mapping[str, Sequence[str]], logs: Mapping[str, object]) -> list[str]:
    """The lines that end a failed run: the cause with its last lines, then one line for each other process.

    Args:
      outcome: an outcome with a cause.
      tails: by the name of each process, its last lines.
      logs: by the name of each process, the path of its log.
    """
    cause = outcome.cause
    said = [f"    {line}" for line in tails[cause.name]]
    what = f"last lines of {logs[cause.name]}:" if said else f"it printed nothing to {logs[cause.name]}"
    lines = [f"{cause.name} failed: {described(cause)}; {what}", *said]
    lines += [f"{each.name}: {described(each)}" for each in outcome.exits if each is not cause]
    return lines


def described(found: Exit) -> str:
    """An exit in words: 'exit code 5 (a peer was lost)', 'killed by SIGTERM, after SIGTERM from the launcher'."""
    if found.was_stopped:
        return "stopped by a signal, hung until the launcher killed it"
    if found.code < 0:
        how = f"killed by {signal.Signals(-found.code).name}"
    else:
        how = f"exit code {found.code}" + (f" ({_MEANINGS[found.code]})" if found.code in _MEANINGS else "")
    return how if found.sent is None else f"{how}, after {signal.Signals(found.sent).name} from the launcher"
