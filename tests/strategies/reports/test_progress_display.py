"""The progress display: a bar on a terminal, plain lines elsewhere."""

import io
import os
import re

import pytest
from rich.console import Console

from strategies.callbacks import Run
from strategies.contract import StepReport
from strategies.reports.progress_display import ProgressDisplay

ESCAPE = "\x1b"
RUN = Run(strategy=None, directory=None, first_step=0, last_step=20)


def report(step, num_steps=5):
    return StepReport(
        step=step,
        num_steps=num_steps,
        examples=1600,
        loss=0.25,
        metrics={"accuracy": 0.875},
        learning_rate=0.1,
        gradient_norm=1.0,
        skipped=0,
        seconds=0.5,
        input_seconds=0.06,
    )


@pytest.fixture
def shown():
    return io.StringIO()


def display(shown, *, terminal, **options) -> ProgressDisplay:
    return ProgressDisplay(Console(file=shown, force_terminal=terminal, width=200), **options)


def played(display, steps=(5, 10, 15, 20), run=RUN):
    display.begin(run)
    display.message("resumed [somewhere]")
    for step in steps:
        display.steps(report(step))
    display.evaluation(steps[-1], {"loss": 0.5, "accuracy": 0.75})
    display.end()


def test_messages_in_the_words_of_the_program(shown):
    display(shown, terminal=False, worded=str.upper).message("zero=1")
    assert shown.getvalue() == "ZERO=1\n"


def test_a_bar_on_a_terminal(shown):
    played(display(shown, terminal=True))
    text = shown.getvalue()
    assert ESCAPE in text
    plain = re.sub(rf"{ESCAPE}\[[0-9;?]*[A-Za-z]", "", text)
    for part in (
        "compiling the first step",
        "20/20",
        "loss 0.2500",
        "accuracy 0.8750",
        "3,200 examples/s",
        "100 ms/step",
        "input 12%",
        "left",
        "step 20  evaluation  loss 0.5000  accuracy 0.7500",
        "resumed [somewhere]",
    ):
        assert part in plain, f"{part!r} is not in {plain!r}"
    assert re.search(r"left (\d+:)?\d+:\d\d", plain), "the time that is left"


def test_a_bar_that_begins_where_a_run_resumes(shown):
    bar = display(shown, terminal=True)
    played(bar, steps=(15,), run=Run(strategy=None, directory=None, first_step=10, last_step=20))
    assert re.search(r"10/20.*15/20", shown.getvalue(), re.DOTALL)


def test_plain_lines_elsewhere(shown):
    played(display(shown, terminal=False, line_seconds=0))
    text = shown.getvalue()
    assert ESCAPE not in text
    lines = text.splitlines()
    assert lines[0] == "resumed [somewhere]"
    assert re.fullmatch(
        r"step 5/20  loss 0\.2500  accuracy 0\.8750  3,200 examples/s  100 ms/step  input 12%  \d+:\d\d left",
        lines[1],
    )
    assert lines[4].startswith("step 20/20") and lines[4].endswith("0:00 left")
    assert lines[5:] == ["step 20  evaluation  loss 0.5000  accuracy 0.7500"]


def test_plain_lines_are_rare(shown):
    """There is at most one line every `line_seconds`; the last step always has one."""
    played(display(shown, terminal=False, line_seconds=1000))
    assert [line.split()[1] for line in shown.getvalue().splitlines()] == ["[somewhere]", "20/20", "20"]


def test_end_without_begin(shown):
    display(shown, terminal=True).end()
    assert shown.getvalue() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
@pytest.mark.parametrize("terminal", [False, True])
def test_a_full_disk_ends_the_display_and_not_the_training(caplog, terminal):
    """With a bar too, because FORCE_COLOR draws it into files."""
    with open("/dev/full", "w") as full:
        played(display(full, terminal=terminal))
    assert caplog.messages == ["progress can't be written (No space left on device): it is not shown from now on"]


def test_a_reader_that_is_gone_ends_the_display_and_not_the_training(caplog, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        played(ProgressDisplay(line_seconds=0))
    assert caplog.messages == ["progress can't be written (Broken pipe): it is not shown from now on"]
