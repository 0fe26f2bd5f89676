"""Faults that a user plans, to see a cluster recover: which process dies or stops, and before which step.

The launcher hands each to its process in the first start's environment; there `fault.py` carries it out.
"""

import dataclasses
import re
import signal
from collections.abc import Sequence

from launch.membership.roles import Roles
from launch.supervision.outcome import Outcome
from launch.supervision.processes import End
from towers.errors import UserError

FAULT_VARIABLE = "TOWERS_FAULT"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_DONE = {"kill": "killed", "stop": "stopped"}
_TARGET = re.compile(r"([a-z]+:\d+)@step(\d+)")


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """One fault.

    Attributes:
      kind: 'kill' or 'stop'.
      name: of the process, as 'worker:1'.
      step: before which it happens.
    """

    kind: str
    name: str
    step: int

    @property
    def flag(self) -> str:
        """As '--kill=worker:1@step20'."""
        return f"--{self.kind}={self.name}@step{self.step}"

    @property
    def order(self) -> str:
        """As 'kill@20', for the process itself."""
        return f"{self.kind}@{self.step}"

    def is_seen_in(self, outcome: Outcome) -> bool:
        """Whether it happened in this start."""
        return any(end.name == self.name and self._is(end) for end in (*outcome.ends, *outcome.outlived))

    def recovered(self, restart: int) -> str:
        """What to say when the cluster went on after it."""
        return f"recovered: {self.name} was {_DONE[self.kind]} at step {self.step}, restart {restart} completed"

    def _is(self, end: End) -> bool:
        if self.kind == "stop":
            return end.stood_still
        return end.sent is None and end.code == -signal.SIGKILL


def planned_faults(
    kills: Sequence[str], stops: Sequence[str], *, roles: Roles, max_restarts: int
) -> dict[str, PlannedFault]:
    """The faults by the name of their process.

    Args:
      kills, stops: as 'worker:1@step20'.
      roles: the cluster's.
      max_restarts: how often it is started again.

    Raises:
      UserError: what is written means nothing, or can't show a recovery.
    """
    found: dict[str, PlannedFault] = {}
    for kind, text in [*(("kill", text) for text in kills), *(("stop", text) for text in stops)]:
        fault = _parsed(kind, text, roles.names)
        if fault.name in found:
            raise UserError(f"{fault.flag}: {fault.name} has {found[fault.name].flag} already; give one of them")
        if kind == "stop" and not set(roles.trainers) - {fault.name}:
            raise UserError(f"{fault.flag}: nobody is there to notice it; add a worker, or take --kill")
        if max_restarts == 0:
            raise UserError(f"{fault.flag}: nothing would start the cluster again; add --max_restarts=1")
        found[fault.name] = fault
    return found


def _parsed(kind: str, text: str, names: Sequence[str]) -> PlannedFault:
    match = _TARGET.fullmatch(text)
    if match is None:
        raise UserError(f"--{kind}={text}: give a process and a step, as --{kind}={names[0]}@step20")
    if match[1] not in names:
        raise UserError(f"--{kind}={text}: there is no {match[1]} in this cluster, only {', '.join(names)}")
    return PlannedFault(kind, match[1], int(match[2]))
