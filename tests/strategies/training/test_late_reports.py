"""Runs with masks, as on GPUs: steps begin before earlier steps' outcomes are known, and nothing is lost."""

import dataclasses
import json
import os
import signal

import pytest

from strategies.callbacks import Callback
from strategies.errors import NonFiniteStep
from strategies.training.checkpoints import Checkpoints
from strategies.training.stop_signals import StopSignals
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import assert_same_bits, shared_strategy, small_strategy, values_of
from tests.strategies.training.test_trainer import HUGE
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from towers.updates.schedules import Constant

OF_THE_CLOCK = {"seconds", "input_seconds", "images_per_second"}


def strategy_of(*, masks: bool, build=shared_strategy, **options):
    # On the second CPU, not the host's: the counters are then beside the parameters, as on a GPU.
    return build(devices=dataclasses.replace(cpus(1, 1), masks=masks), **options)


@dataclasses.dataclass(frozen=True)
class Spoilt(Constant):
    """A constant learning rate, except at step `at`, after which the parameters overflow."""

    at: int = 0

    def __call__(self, step):
        return HUGE if step == self.at else super().__call__(step)


class Watched(Callback):
    """Records at each report how far the strategy is ahead; calls `act` when step `act_at` is reported."""

    def __init__(self, act_at=None, act=None, boundaries=()):
        self.reported, self.ahead, self.seconds, self.begun = [], [], [], []
        self._act_at, self._act, self._boundaries = act_at, act, boundaries

    def begin(self, run):
        self._strategy = run.strategy

    def boundaries(self):
        return self._boundaries

    def before_steps(self, step):
        self.begun.append((step, self.reported[-1] if self.reported else 0))

    def steps(self, report):
        self.reported.append(report.step)
        self.ahead.append(self._strategy.step - report.step)
        self.seconds.append((report.seconds, report.input_seconds))
        if report.step == self._act_at:
            self._act()


def fitted(directory, *, masks, stop_requested=lambda: False, watched=None, steps=12, options=None, **files):
    """(strategy, watched, error or None) of a run with files."""
    strategy, watched = strategy_of(masks=masks, **options or {}), watched or Watched()
    files = TrainerOptions(steps=steps, directory=directory, **files)
    error = None
    try:
        Trainer(strategy, files, callbacks=[watched], stop_requested=stop_requested).fit()
    except NonFiniteStep as caught:
        error = caught
    return strategy, watched, error


def lines_of(directory) -> list[dict]:
    """metrics.jsonl without figures that depend on the clock."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in OF_THE_CLOCK} for line in lines]


def summary_of(directory) -> dict:
    found = json.loads((directory / "summary.json").read_text())
    return {name: found[name] for name in ("outcome", "steps", "examples", "skipped_steps", "loss", "evaluation")}


def summary_seconds(directory) -> float:
    return json.loads((directory / "summary.json").read_text())["training_seconds"]


CADENCES = [
    {"report_every_steps": 2, "checkpoint_every_steps": 5, "evaluate_every_steps": 4},
    {"report_every_steps": 1},
    {"report_every_steps": 5, "evaluate_every_steps": 10},
]


@pytest.mark.parametrize("cadence", first_quick(CADENCES))
def test_late_reports_are_those_of_a_run_that_waits(tmp_path, cadence):
    runs = []
    for masks in (False, True):
        watched = Watched(boundaries=(7,))
        # From step 10 on all steps are skipped.
        options = {"on_nan": "skip", "schedule": Spoilt(0.05, at=9)}
        strategy, *_ = fitted(tmp_path / str(masks), masks=masks, watched=watched, options=options, **cadence)
        runs.append((lines_of(tmp_path / str(masks)), summary_of(tmp_path / str(masks)), values_of(strategy)))
    (lines, summary, values), (found_lines, found_summary, found_values) = runs
    assert found_lines == lines
    assert found_summary == summary
    assert_same_bits(found_values, values)
    assert max(watched.ahead) > 0, "no report was late"
    assert (7, 7) in watched.begun, "all is reported at a boundary"
    assert all(0 < waited <= seconds for seconds, waited in watched.seconds)
    assert sum(seconds for seconds, _ in watched.seconds) <= summary_seconds(tmp_path / "True")


@pytest.mark.parametrize("report_every", first_quick([1, 4]))
def test_a_step_that_is_not_finite_ends_the_run(tmp_path, report_every):
    runs = []
    for masks in (False, True):
        folder = tmp_path / str(masks)
        strategy, watched, error = fitted(
            folder,
            masks=masks,
            checkpoint_every_steps=2,
            report_every_steps=report_every,
            options={"schedule": Spoilt(0.05, at=4)},
        )
        step = Checkpoints(folder / "checkpoints", strategy_of(masks=masks, build=small_strategy)).restore_latest()
        runs.append((str(error), error.step, step, summary_of(folder), watched.reported))
        runs[-1] += ({name: value.tobytes() for name, value in values_of(strategy).items()},)
    assert runs[1] == runs[0]
    assert runs[1][1] == 5


@pytest.mark.full
def test_a_signal_saves_the_step_that_is_reported(tmp_path):
    watched = Watched(act_at=4, act=lambda: os.kill(os.getpid(), signal.SIGTERM))
    options = {"report_every_steps": 1, "evaluate_every_epochs": None}
    with StopSignals() as signals:
        strategy, *_ = fitted(tmp_path, masks=True, watched=watched, stop_requested=signals.requested, **options)
    assert watched.ahead[3] > 0
    again = strategy_of(masks=True, build=small_strategy)
    saved = Checkpoints(tmp_path / "checkpoints", again).restore_latest()
    assert saved == strategy.step == watched.reported[-1] == lines_of(tmp_path)[-1]["step"] > 4
    assert_same_bits(values_of(again), values_of(strategy))
    # The resumed run is like one that was not stopped.
    fitted(tmp_path, masks=True, **options)
    fitted(tmp_path / "undisturbed", masks=False, **options)
    assert lines_of(tmp_path) == lines_of(tmp_path / "undisturbed")


@pytest.mark.full
def test_steps_before_an_error_are_reported(monkeypatch):
    strategy, watched = strategy_of(masks=True), Watched()
    train = strategy.engine.train

    def failing(batch, rate):
        if strategy.step == 6 and watched.reported[-1] < 6:
            raise OSError("no batch")
        return train(batch, rate)

    monkeypatch.setattr(strategy.engine, "train", failing)
    trainer = Trainer(
        strategy, TrainerOptions(steps=12, report_every_steps=3), callbacks=[watched], stop_requested=lambda: False
    )
    with pytest.raises(OSError, match="no batch"):
        trainer.fit()
    assert watched.reported[-1] == strategy.step == 6
