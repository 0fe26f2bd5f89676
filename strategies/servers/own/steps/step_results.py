"""Results of a run's steps on server 0: the model's state, the figures, and the first step that was not finite."""

import threading

import numpy as np

from strategies.servers.own.steps.model_state import ModelState
from strategies.servers.tally import Tally


class StepResults:
    """The results since the chief's last start.

    Attributes:
      lock: held while a step is counted, and while consistent values are read.
      state: the model's state.
      tally: the figures.
      bad_step: the first step that was not finite, if no step begins after it; else None.
    """

    def __init__(self, *, stops_if_bad: bool):
        """Args:
        stops_if_bad: whether no step begins after one that was not finite.
        """
        self.lock = threading.Lock()
        self._stops_if_bad = stops_if_bad
        self.restart(ModelState(np.zeros(0), np.zeros(0, bool)))

    def restart(self, state: ModelState) -> None:
        """Sets the state given by the chief, and restarts the figures."""
        self.state, self.tally = state, Tally()
        self.bad_step: int | None = None

    def stop_at(self, step: int, *, finite: bool) -> bool:
        """Ends the run at a step that was not finite; returns True once. The caller holds the lock."""
        if finite or not self._stops_if_bad or self.bad_step is not None:
            return False
        self.bad_step = step
        return True
