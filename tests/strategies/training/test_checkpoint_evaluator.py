"""When an evaluator has seen all of a run, and which checkpoints it evaluates."""

import json
import os
import time

import pytest

from strategies.callbacks import Callback
from strategies.training.checkpoint_evaluator import follow
from strategies.training.checkpoints import Checkpoints
from tests.strategies.small_task import shared_strategy, small_strategy
from tests.towers.user_errors import refused
from towers.errors import UserError

LIMIT_SECONDS = 30


class Seen(Callback):
    """The steps that were evaluated."""

    def __init__(self):
        self.steps: list[int] = []

    def evaluation(self, step, metrics):
        self.steps.append(step)


def save(directory, *steps) -> None:
    strategy = shared_strategy()
    checkpoints = Checkpoints(directory / "checkpoints", strategy, keep=5)
    for step in steps:
        strategy.run_steps(step - strategy.step)
        checkpoints.save()


def summarize(directory, outcome, written_at=None) -> None:
    path = directory / "summary.json"
    path.write_text(json.dumps({"outcome": outcome}))
    if written_at is not None:
        os.utime(path, (written_at, written_at))


def followed(directory, *, last_step, during=lambda: None, strategy=None) -> tuple[bool, list[int]]:
    """Whether the evaluator found in time that the run is over, and the steps evaluated; `during` runs once."""
    seen, deadline, done = Seen(), time.monotonic() + LIMIT_SECONDS, []

    def stop_requested():
        if not done:
            done.append(during())
        return time.monotonic() > deadline

    over = follow(
        strategy or shared_strategy(),
        directory,
        [seen],
        stop_requested=stop_requested,
        last_step=last_step,
        poll_seconds=0.01,
    )
    return over, seen.steps


@pytest.mark.timeout(120)
def test_a_run_that_is_complete_at_the_start(tmp_path):
    """The chief trains nothing and leaves summary.json unchanged, so nothing new is ever written."""
    save(tmp_path, 1, 2)
    summarize(tmp_path, "completed", written_at=1)
    assert followed(tmp_path, last_step=2) == (True, [2])


@pytest.mark.timeout(120)
def test_the_clock_of_the_files_machine_is_behind(tmp_path):
    save(tmp_path, 1)
    summarize(tmp_path, "completed", written_at=time.time() - 10_000)

    def end():
        summarize(tmp_path, "interrupted", written_at=time.time() - 5_000)

    assert followed(tmp_path, last_step=9, during=end) == (True, [1])


@pytest.mark.timeout(120)
def test_an_earlier_run_in_the_same_folder(tmp_path):
    """The chief moves that run's checkpoints away, and its evaluations are of other weights."""
    save(tmp_path, 1, 2)
    summarize(tmp_path, "completed")
    (tmp_path / "evaluator").mkdir()
    (tmp_path / "evaluator" / "metrics.jsonl").write_text('{"kind": "evaluation", "step": 2, "loss": 7.0}\n')

    def train_anew():
        (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.before-1")
        save(tmp_path, 2)
        summarize(tmp_path, "completed", written_at=time.time() + 5)

    assert followed(tmp_path, last_step=None, during=train_anew) == (True, [2])


class _SavesMeanwhile:
    """While the first checkpoint is read, the run saves the next one and deletes the first."""

    def __init__(self, directory):
        self._strategy, self._run = shared_strategy(), small_strategy()
        self._saved = Checkpoints(directory / "checkpoints", self._run, keep=1)
        self._save_next()

    def _save_next(self):
        self._run.run_steps(1)
        self._saved.save()

    def restore(self, part, read):
        if self._run.step == 1:
            self._save_next()
        self._strategy.restore(part, read)

    def __getattr__(self, name):
        return getattr(self._strategy, name)


@pytest.mark.timeout(120)
def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_the_next_one(tmp_path):
    assert followed(tmp_path, last_step=2, strategy=_SavesMeanwhile(tmp_path)) == (True, [2])


@pytest.mark.timeout(120)
def test_a_checkpoint_that_no_one_deleted_and_that_cannot_be_read_is_an_error(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "step-2.data-00000-of-00001").write_bytes(b"")
    with pytest.raises(UserError, match="none of its 1 checkpoints can be read"):
        followed(tmp_path, last_step=2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "text, problem",
    [("null", "holds null"), ("[1, 2]", "holds [1, 2]"), ('{"outcome": 3}', "holds {"), ("{", "it is no JSON")],
)
def test_a_summary_that_was_changed_by_hand_is_one_line(tmp_path, text, problem):
    save(tmp_path, 1)
    with refused(f"{tmp_path / 'summary.json'}: ", problem, "put back the file that the run wrote"):
        followed(tmp_path, last_step=9, during=lambda: (tmp_path / "summary.json").write_text(text))


@pytest.mark.timeout(120)
def test_lines_of_its_log_that_are_no_records_are_dropped(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "evaluator").mkdir()
    (tmp_path / "evaluator" / "metrics.jsonl").write_bytes(b'7\nnull\n{"kind": "evaluation"}\n\xff\n')
    assert followed(tmp_path, last_step=2) == (True, [2])


@pytest.mark.timeout(120)
def test_a_second_evaluator_of_a_run_is_refused_and_the_first_goes_on(tmp_path):
    save(tmp_path, 1)

    def second():
        with refused(
            f"{tmp_path}/evaluator: process {os.getpid()} on ", "only one evaluator at a time", "stop it"
        ):
            followed(tmp_path, last_step=1)

    assert followed(tmp_path, last_step=1, during=second) == (True, [1])
    assert followed(tmp_path, last_step=1) == (True, [1]), "the first one's lock is released"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "evaluator").touch()
    with refused(f"{tmp_path}/evaluator: nothing can be written there"):
        followed(tmp_path, last_step=1)
