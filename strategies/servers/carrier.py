"""What the chief of parameter servers asks of an engine: ours (`own_carrier`) or TensorFlow's (`distribute`)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from strategies.servers.report_section import ServerFigures
from strategies.servers.tables import Stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """The values of a run, as the servers hold them.

    Attributes:
      parameters: all parameters.
      slots: by name, like the parameters.
      state: [all state], in the state's own precision; float64 if it has several dtypes.
    """

    parameters: Stored
    slots: Mapping[str, Stored]
    state: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What the servers begin with.

    Attributes:
      values: the values.
      decays: bool, like the parameters' vector: the elements that weight decay applies to.
      averaged: bool, like the state: the elements that are averaged over workers.
      step: number of steps done.
      updates: number of updates applied.
      positions: each asynchronous worker's next batch, as for `BatchOrder`.
      state_dtypes: dtype and number of elements of each state variable, in order.
    """

    values: Values
    decays: np.ndarray
    averaged: np.ndarray
    step: int
    updates: int
    positions: Sequence[int] | None = None
    state_dtypes: Sequence[tuple[str, int]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the workers are.

    Attributes:
      done: number of steps done.
      bad_step: a step that was not finite and ended the run; None if there is none.
      absent: indices of workers that are not connected.
      missing: indices of workers whose step is waited for.
    """

    done: int
    bad_step: int | None
    absent: Sequence[int]
    missing: Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused:
    """Attributes:
    idle: whether no worker computes any more.
    missing: indices of workers whose step is waited for.
    done: number of steps done.
    totals: 'steps', 'examples' and 'skipped' since `start`.
    positions: each worker's next batch; None if that is the next step's.
    """

    idle: bool
    missing: Sequence[int]
    done: int
    totals: Mapping[str, int]
    positions: Sequence[int] | None = None


class Carrier(Protocol):
    """The servers and workers, as the chief uses them. Every method may raise PeerLost."""

    def free_bytes(self) -> Mapping[str, int]:
        """Memory that each server can still get, by its name."""

    def start(self, begin: Start) -> None:
        """Gives all servers their values; workers may begin steps from begin.step on."""

    def advance(self, wanted: int, until: int) -> Progress:
        """Allows steps below `until`, and waits a short time for `wanted` steps to be done."""

    def pause(self) -> Paused:
        """Lets no step begin, and waits a short time for those that were begun."""

    def values(self) -> Values:
        """The servers' values; call it after `pause`."""

    def report(self) -> Mapping:
        """The figures of the steps since the last report, as `servers.tally.Tally.take` names them, with 'done',
        'totals', 'turned_away' (gradients dropped) and 'stop_asked' (whether a worker was asked to stop)."""

    def server_figures(self) -> Sequence[ServerFigures]:
        """One for each server."""

    def end(self, how: str) -> None:
        """Ends the other processes: 'done' or 'interrupted'."""
