"""Evaluates the checkpoints of a run, in a separate process, while the run trains."""

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

from strategies.callbacks import Callback, Run
from strategies.contract import Strategy
from strategies.training.checkpoints import Checkpoints

_OVER = ("completed", "interrupted", "not_finite", "failed")


def follow(
    strategy: Strategy,
    directory: pathlib.Path,
    callbacks: Sequence[Callback],
    *,
    stop_requested: Callable[[], bool],
    poll_seconds: float = 0.5,
) -> bool:
    """Evaluates the newest checkpoint again and again until the run is over; False if it was stopped before.

    Of the checkpoints that are saved during an evaluation, only the newest is evaluated. The run is over when its
    summary is newer than the start of this call and its last checkpoint is evaluated.

    Args:
      strategy: evaluates the checkpoints' values; it does not train.
      directory: folder of the run.
      callbacks: called with each evaluation.
      stop_requested: called between evaluations and between their batches; True stops.
      poll_seconds: seconds between two looks for a new checkpoint.

    Raises:
      UserError: the checkpoints are of another model.
    """
    checkpoints = Checkpoints(directory / "checkpoints", strategy)
    summary, began = directory / "summary.json", time.time()
    own = directory / "evaluator"
    own.mkdir(parents=True, exist_ok=True)
    known = evaluated_steps(own / "metrics.jsonl")
    run = Run(strategy=strategy, directory=own, first_step=max(known, default=0), last_step=sys.maxsize)
    for callback in callbacks:
        callback.begin(run)
    evaluated = None
    try:
        while not stop_requested():
            over = _is_over(summary, began)
            newest = next(iter(checkpoints.files.saved()), None)
            if newest is not None and newest != evaluated:
                step, evaluated = checkpoints.restore_latest(), newest
                if step not in known:
                    metrics = strategy.evaluate(stop_requested=stop_requested)
                    for callback in callbacks if metrics is not None else ():
                        callback.evaluation(step, metrics)
            elif over:
                return True
            else:
                time.sleep(poll_seconds)
        return False
    finally:
        for callback in callbacks:
            callback.end()


def evaluated_steps(log: pathlib.Path) -> set[int]:
    """Steps whose evaluation is in a metrics.jsonl; empty if the file does not exist."""
    if not log.exists():
        return set()
    found = set()
    for line in log.read_text(encoding="utf-8").splitlines():
        # The last line may be incomplete.
        with contextlib.suppress(ValueError):
            found.add(json.loads(line)["step"])
    return found


def _is_over(summary: pathlib.Path, began: float) -> bool:
    try:
        return summary.stat().st_mtime >= began and json.loads(summary.read_text())["outcome"] in _OVER
    except FileNotFoundError:
        return False
