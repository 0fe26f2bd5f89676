"""What a run prints at its end."""

import os
import pathlib

import pytest

from launch import binary
from launch.supervision.run_end import print_results, reported_end
from strategies.training.stop_signals import StopSignals
from strategies.training.trainer import FitResult


def result(*, completed=True, skipped=0) -> FitResult:
    return FitResult(
        completed=completed,
        step=2000,
        loss=0.5,
        evaluation=None,
        evaluated_step=None,
        summary={"images_per_second": None, "straggler": None, "skipped_steps": skipped},
        tables=(),
        files={},
    )


@pytest.mark.parametrize("skipped", [0, 1200])
def test_skipped_steps_are_printed(skipped, capsys):
    print_results(result(skipped=skipped))
    expected = "skipped: 1,200 steps of this run were not finite and changed no parameter\n" if skipped else ""
    assert capsys.readouterr().out == expected


def test_the_exit_code_of_a_stopped_run_whose_reader_is_gone(monkeypatch):
    """Ctrl-C ends a `| tee` behind the program too."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout, pytest.raises(SystemExit) as exit:
        monkeypatch.setattr("sys.stdout", stdout)
        reported_end(pathlib.Path(), keeps_files=True)(result(completed=False), StopSignals())
    assert exit.value.code == binary.INTERRUPTED
