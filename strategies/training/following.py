"""Evaluation beside training: a process of its own follows the checkpoints of a run."""

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
    """Evaluates each newest checkpoint until the run is over; False if it was asked to stop before.

    Checkpoints that come while one is evaluated are passed over but for the newest. The run is over when its
    summary was written after this began, and its last checkpoint was evaluated.

    Args:
      strategy: takes the checkpoints' values; it trains nothing.
      directory: of the run.
      callbacks: told of each evaluation.
      stop_requested: asked between evaluations.
      poll_seconds: how often to look for a new checkpoint.

    Raises:
      UserError: checkpoints of another model.
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
            newest = next(iter(checkpoints.saved()), None)
            if newest is not None and newest != evaluated:
                step, evaluated = checkpoints.restore_latest(), newest
                if step not in known:
                    metrics = strategy.evaluate()
                    for callback in callbacks:
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
    """Steps whose evaluation stands in a metrics.jsonl; of none there are none."""
    if not log.exists():
        return set()
    found = set()
    for line in log.read_text(encoding="utf-8").splitlines():
        # The last line may be half a one.
        with contextlib.suppress(ValueError):
            found.add(json.loads(line)["step"])
    return found


def _is_over(summary: pathlib.Path, began: float) -> bool:
    try:
        return summary.stat().st_mtime >= began and json.loads(summary.read_text())["outcome"] in _OVER
    except FileNotFoundError:
        return False
