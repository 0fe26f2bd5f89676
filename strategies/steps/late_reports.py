"""Reports that come one call late, so that a device continues with the next step while a report is made.

They are used where masks skip updates, on GPUs: a step that is not finite is detected at most one call later, and
masks skip all updates after it. Until a report is made, the strategy's `step` counts the started steps. CPUs would
gain nothing, and a ring's processes meet on the host at the end of each call.
"""

import dataclasses
from collections.abc import Callable, Sequence

from strategies.contract import StepReport
from strategies.steps.outcomes_on_host import Arrived, arriving_on_host
from towers.mean_and_update import StepOutcome

# Makes a report from the first step's index, the outcomes, and the seconds that the steps waited for batches.
MakeReport = Callable[[int, Arrived, float], StepReport]


@dataclasses.dataclass(frozen=True)
class _StartedSteps:
    """Steps first .. end - 1, which were started; `arrived` waits for them."""

    first: int
    end: int
    arrived: Callable[[], Arrived]
    input_seconds: float


class LateReports:
    """The last call's steps, if they are not reported yet, and a report that is not returned yet."""

    def __init__(self) -> None:
        self._started: _StartedSteps | None = None
        self._known: StepReport | None = None

    @property
    def end(self) -> int | None:
        """The step after the started steps that are not reported; None if all are reported."""
        return None if self._started is None else self._started.end

    def add(self, first: int, outcomes: Sequence[StepOutcome], input_seconds: float) -> None:
        """Adds started steps, from `first` on, without waiting for them."""
        arrived = arriving_on_host(outcomes)
        self._started = _StartedSteps(first, first + len(outcomes), arrived, input_seconds)

    def read(self, make_report: MakeReport) -> None:
        """Waits for the started steps, if there are any, and makes their report."""
        started, self._started = self._started, None
        if started is not None:
            self._known = make_report(started.first, started.arrived(), started.input_seconds)

    def settle(self, make_report: MakeReport) -> StepReport | None:
        """The next report that was not returned yet, waiting for its steps; None if there is none."""
        if self._known is None:
            self.read(make_report)
        return self.take()

    def take(self) -> StepReport | None:
        """Returns the latest report once, then None."""
        known, self._known = self._known, None
        return known
