"""Evaluates the checkpoints of a run, in a separate process, while the run trains."""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

from strategies.callbacks import Callback, Run
from strategies.contract import Strategy
from strategies.reports.metrics_log import evaluated_steps
from strategies.reports.summary import read_outcome
from strategies.training.checkpoint_files import check_writable
from strategies.training.checkpoints import Checkpoints
from strategies.training.run_lock import RunLock
from towers.errors import UserError


def follow(
    strategy: Strategy,
    directory: pathlib.Path,
    callbacks: Sequence[Callback],
    *,
    stop_requested: Callable[[], bool],
    last_step: int | None = None,
    poll_seconds: float = 0.5,
) -> bool:
    """Repeatedly evaluates the newest checkpoint until the run is over; returns False if stopped before.

    Of the checkpoints that are saved during an evaluation, only the newest is evaluated. The run is over when its
    summary was written since the start of this call and its last checkpoint is evaluated. It is also over when the
    checkpoint of the last step is evaluated: a run that is complete at its start leaves its summary unchanged.

    Args:
      strategy: evaluates the checkpoints' values; it does not train.
      directory: folder of the run.
      callbacks: called with each evaluation.
      stop_requested: called between evaluations and between their batches; True stops.
      last_step: last step of the run; None if the checkpoints and evaluations that the folder has at the start are
        of an earlier run, which this one does not resume.
      poll_seconds: seconds between checks for a new checkpoint.

    Raises:
      UserError: the checkpoints are of another model, the run's folder can't be written to, another evaluator
        writes there, or the contents of its summary.json were not written by a run.
    """
    checkpoints = Checkpoints(directory / "checkpoints", strategy)
    # Times of the file are compared with each other: this machine's clock may differ from the file server's.
    summary = directory / "summary.json"
    before = _written_at(summary)
    own = directory / "evaluator"
    check_writable(own)
    lock = RunLock(own, shown=str(own), writer="evaluator", fix="wait for its end or stop it")
    is_resumed = last_step is not None
    with contextlib.ExitStack() as ends:
        lock.acquire(create=True)
        ends.callback(lock.release)
        earlier = [] if is_resumed else _saved(checkpoints)
        known = evaluated_steps(own / "metrics.jsonl") if is_resumed else set()
        run = Run(strategy=strategy, directory=own, first_step=max(known, default=0), last_step=sys.maxsize)
        for callback in callbacks:
            callback.begin(run)
            ends.callback(callback.end)
        step = evaluated = None
        while not stop_requested():
            over = _is_over(summary, before) or (None not in (step, last_step) and step >= last_step)
            newest = next((each for each in _saved(checkpoints) if each not in earlier), None)
            if newest is not None and newest != evaluated:
                step, evaluated = _restored(checkpoints, *newest), newest
                if step is not None and step not in known:
                    metrics = strategy.evaluate(stop_requested=stop_requested)
                    known.add(step)  # the restored one may be newer than `newest`, and would be evaluated again
                    for callback in callbacks if metrics is not None else ():
                        callback.evaluation(step, metrics)
            elif over:
                return True
            else:
                time.sleep(poll_seconds)
        return False


def _restored(checkpoints: Checkpoints, prefix: str, written_at: int | None) -> int | None:
    """Restores the newest checkpoint; returns its step, or None if the run deleted it for a newer one."""
    try:
        return checkpoints.restore_latest()
    except UserError:
        if (prefix, written_at) in _saved(checkpoints):
            raise
        return None


def _saved(checkpoints: Checkpoints) -> list[tuple[str, int | None]]:
    """The checkpoints in the folder, newest first: (prefix, time of writing)."""
    return [(prefix, _written_at(pathlib.Path(prefix + ".index"))) for prefix in checkpoints.files.saved()]


def _is_over(summary: pathlib.Path, before: int | None) -> bool:
    if _written_at(summary) in (None, before):
        return False
    read_outcome(summary)  # any outcome means that the run has ended
    return True


def _written_at(path: pathlib.Path) -> int | None:
    """When the file was written, in nanoseconds of its own machine's clock; None if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
