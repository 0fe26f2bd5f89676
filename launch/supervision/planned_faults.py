"""Faults that a user plans in order to test recovery: which process is killed or stopped, and before which step.

The launcher passes each fault to its process in the environment of the first start; `fault_injection.py` runs it.
"""

import dataclasses
import re
import signal
from collections.abc import Sequence

from launch.membership.roles import Roles
from launch.supervision.outcome import Outcome
from launch.supervision.processes import Exit
from towers.errors import UserError

FAULT_VARIABLE = "TOWERS_FAULT"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_DONE = {"kill": "killed", "stop": "stopped"}
_TARGET = re.compile(r"([a-z]+:\d+)@step(\d+)")


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """A planned fault of one process.

    Attributes:
      kind: 'kill' or 'stop'.
      name: the process, as 'worker:1'.
      step: index of the step before which it happens.
    """

    kind: str
    name: str
    step: int

    @property
    def flag(self) -> str:
        """The flag that plans it, as '--kill=worker:1@step20'."""
        return f"--{self.kind}={self.name}@step{self.step}"

    @property
    def order(self) -> str:
        """The value of TOWERS_FAULT, as 'kill@20'."""
        return f"{self.kind}@{self.step}"

    def is_seen_in(self, outcome: Outcome) -> bool:
        """Whether the fault happened in this start."""
        return any(each.name == self.name and self._is(each) for each in (*outcome.exits, *outcome.replaced))

    def recovered(self, restart: int) -> str:
        """The launcher's message when the cluster has recovered from the fault, after so many restarts."""
        how = f"restart {restart} completed" if restart else "the others completed"
        return f"recovered: {self.name} was {_DONE[self.kind]} at step {self.step}, {how}"

    def _is(self, found: Exit) -> bool:
        was_killed = found.sent is None and found.code == -signal.SIGKILL
        # A stopped worker may be killed by its own guard.
        return was_killed or (self.kind == "stop" and found.was_stopped)


def planned_faults(
    kills: Sequence[str], stops: Sequence[str], *, roles: Roles, max_restarts: int
) -> dict[str, PlannedFault]:
    """The faults, by the name of their process.

    Args:
      kills, stops: texts such as 'worker:1@step20'.
      roles: the processes of the cluster.
      max_restarts: maximum number of restarts.

    Raises:
      UserError: a text is invalid, or the cluster could not recover from the fault.
    """
    found: dict[str, PlannedFault] = {}
    for kind, text in [*(("kill", text) for text in kills), *(("stop", text) for text in stops)]:
        fault = _parsed(kind, text, roles.names)
        if fault.name in found:
            raise UserError(
                f"{fault.flag}: {fault.name} already has {found[fault.name].flag}; give one fault for each process"
            )
        if fault.name not in roles.trainers:
            raise UserError(
                f"{fault.flag}: {fault.name} takes no steps, so the fault would never happen; name one of "
                f"{', '.join(roles.trainers)}"
            )
        if kind == "stop" and not set(roles.trainers) - {fault.name}:
            raise UserError(
                f"{fault.flag}: no other worker would notice that {fault.name} hangs; add a worker, or use --kill"
            )
        others_continue = fault.name in roles.replaceable and set(roles.replaceable) - {fault.name, *found}
        if max_restarts == 0 and not (kind == "kill" and others_continue):
            raise UserError(f"{fault.flag}: the cluster would not restart after the fault; add --max_restarts=1")
        found[fault.name] = fault
    return found


def _parsed(kind: str, text: str, names: Sequence[str]) -> PlannedFault:
    match = _TARGET.fullmatch(text)
    if match is None:
        raise UserError(f"--{kind}={text}: give a process and a step, for example --{kind}={names[0]}@step20")
    if match[1] not in names:
        raise UserError(f"--{kind}={text}: this cluster has no {match[1]}; name one of {', '.join(names)}")
    return PlannedFault(kind, match[1], int(match[2]))
