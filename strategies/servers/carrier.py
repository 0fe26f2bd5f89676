"""The chief's interface to an engine of parameter servers: ours (`own`) or TensorFlow's (`distribute`)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from strategies.servers.report_section import ServerFigures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The values with which the servers begin.

    Attributes:
      parameters: all parameters, by canonical name. Slots begin as zeros, or keep the values that were written.
      slot_names: names of the slots.
      state: all state except the frozen weights, as one vector in its own precision; float64 if precisions differ.
      decays: bool, like the parameters' vector: the elements that weight decay applies to.
      averaged: bool, like the state: the elements that are averaged over workers.
      step: number of steps done.
      updates: number of updates applied.
      positions: each asynchronous worker's next batch, as for `BatchOrder`.
      state_dtypes: dtype and number of elements of each variable in `state`, in order.
      frozen: the frozen weights, in the model's order. Workers get them once; no update changes them.
    """

    parameters: Mapping[str, tf.Variable]
    slot_names: Sequence[str]
    state: np.ndarray
    decays: np.ndarray
    averaged: np.ndarray
    step: int
    updates: int
    positions: Sequence[int] | None = None
    state_dtypes: Sequence[tuple[str, int]] = ()
    frozen: Sequence[np.ndarray] = ()


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
        """Bytes of memory that each server can still get, by its name."""

    def start(self, begin: Start) -> None:
        """Sends all servers their values; then workers may begin steps from begin.step on."""

    def advance(self, wanted: int, until: int) -> Progress:
        """Allows steps below `until`, and waits a short time for `wanted` steps to be done."""

    def pause(self) -> Paused:
        """Lets no step begin, and waits a short time for steps in progress."""

    def read(self, slot: str | None, name: str, begin: int, end: int) -> np.ndarray:
        """A part of a parameter, or of its slot: [end - begin], elements in C order. Call it after `pause`.

        Args:
          slot: name of the slot; None for the parameter.
          name: canonical name of the parameter.
          begin, end: indices of elements; for a table they must be at row boundaries.
        """

    def write(self, slot: str | None, name: str, begin: int, values: np.ndarray) -> None:
        """Sets a part, as in `read`. Parts must come in order, and parameters in the model's order."""

    def state(self) -> np.ndarray:
        """As `Start.state`; call it after `pause`."""

    def report(self) -> Mapping:
        """The figures of the steps since the last report, as `servers.tally.Tally.take` names them.

        Also has 'done', 'totals', 'turned_away' (number of dropped gradients) and 'stop_asked' (whether a worker
        or a server was asked to stop).
        """

    def server_figures(self) -> Sequence[ServerFigures]:
        """Each server's figures at the time of the last `report`."""

    def end(self, how: str) -> None:
        """Ends the other processes: 'done' or 'interrupted'."""
