"""Executes a planned fault: kills or stops its own process before a step, as the launcher ordered."""

import os
import re
import signal
import sys

from launch.supervision.planned_faults import FAULT_VARIABLE, SIGNALS
from strategies.callbacks import Callback, Run
from towers.errors import UserError

_ORDER = re.compile(rf"({'|'.join(SIGNALS)})@(\d+)")


class Fault(Callback):
    """Sends SIGKILL or SIGSTOP to this process right before a step begins."""

    def __init__(self, number: signal.Signals, step: int):
        self._number, self._step, self._is_past = number, step, False

    def check(self, run: Run) -> None:
        if not run.first_step <= self._step < run.last_step:
            raise UserError(
                f"a fault is planned at step {self._step}, but this run takes steps {run.first_step} to "
                f"{run.last_step - 1}; choose one of these"
            )

    def boundaries(self):
        return (self._step,)

    def before_steps(self, step):
        # `>=`: a worker of parameter servers does not begin every step. A process that was stopped and then
        # continued must not be stopped again.
        if step >= self._step and not self._is_past:
            self._is_past = True
            print(f"planned fault: {self._number.name} before step {step}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), self._number)


def faults_from_environment() -> list[Callback]:
    """The fault that the launcher ordered for this process, in a list; [] for none.

    Raises:
      UserError: TOWERS_FAULT is invalid.
    """
    order = os.environ.get(FAULT_VARIABLE)
    if order is None:
        return []
    match = _ORDER.fullmatch(order)
    if match is None:
        raise UserError(f"{FAULT_VARIABLE}={order}: give a fault and a step, for example kill@20 or stop@20")
    return [Fault(SIGNALS[match[1]], int(match[2]))]
