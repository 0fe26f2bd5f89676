"""`python -m launch.train` as a process: its files, its exit codes, and that it resumes after any end."""

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios

import pytest

from tests.launch.nursery import forked, run_forked
from tests.launch.programs import LAST_STEP, TINY, assert_same_end, ended, environment, listing, wait_for

pytestmark = pytest.mark.timeout(300)


class TestFinishedRun:
    @pytest.mark.full
    def test_it_prints_the_path_of_every_result(self, finished_run):
        found = dict(
            line.split(": ", 1)
            for line in finished_run.ended.out.splitlines()
            if line.partition(": ")[2][:1] == "/"
        )
        directory = finished_run.directory
        assert found == {
            "checkpoint": str(directory / "checkpoints" / f"step-{LAST_STEP}"),
            "model": str(directory / "model.keras"),
            "metrics": str(directory / "metrics.jsonl"),
            "summary": str(directory / "summary.json"),
            "tensorboard": str(directory / "tensorboard"),
        }
        assert (directory / "checkpoints" / f"step-{LAST_STEP}.index").exists()
        for what in ("model", "metrics", "summary", "tensorboard"):
            assert (directory / found[what]).exists()

    def test_stderr_is_empty(self, finished_run):
        assert finished_run.ended.err == ""

    def test_numbers_are_printed(self, finished_run):
        out = finished_run.ended.out
        assert f"step {LAST_STEP}: evaluation loss " in out
        assert " examples/s, steady median" in out

    def test_flags_are_in_the_summary(self, finished_run):
        summary = json.loads((finished_run.directory / "summary.json").read_text())
        assert (summary["outcome"], summary["steps"]) == ("completed", LAST_STEP)
        flags = summary["flags"]
        assert (flags["model"], flags["learning_rate"], flags["num_towers"]) == ("tiny", 0.02, 2)

    def test_nothing_half_written_is_left(self, finished_run):
        names = listing(finished_run.directory)
        assert not [name for name in names if "temp" in name or ".new" in name or "tmp" in name]


@pytest.mark.full
def test_killed_twice_and_restarted(finished_run, tmp_path):
    """After SIGKILL, which leaves no time to save, training resumes from the newest checkpoint."""
    command = ("-m", "launch.train", *TINY, "--directory=run")
    for step in (5, 15):
        with forked(*command, cwd=tmp_path) as process:
            wait_for(tmp_path / "run" / "checkpoints" / f"step-{step}.index", process)
            process.kill()
            killed = ended(process)
        assert killed.code == -signal.SIGKILL
        assert not (tmp_path / "run" / "model.keras").exists(), "training ended before it was killed"
    last = run_forked(*command, cwd=tmp_path)
    assert last.code == 0, last.err
    assert f"resumed at step {15}" in last.out or "resumed at step 20" in last.out
    assert_same_end(tmp_path / "run", finished_run.directory)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(1, LAST_STEP + 1)), "each step once, in order"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stopped_by_a_signal_and_restarted(finished_run, tmp_path, number):
    command = ("-m", "launch.train", *TINY, "--directory=run", "--checkpoint_every_steps=1000")
    with forked(*command, cwd=tmp_path) as process:
        wait_for(tmp_path / "run" / "metrics.jsonl", process)
        while not (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 3:
            assert process.poll() is None
        process.send_signal(number)
        stopped = ended(process)
    assert stopped.code == 75, stopped.err
    [notice] = [line for line in stopped.out.splitlines() if line.startswith(number.name)]
    step = int(notice.partition("stopped at step ")[2].partition(";")[0])
    assert 3 <= step < LAST_STEP
    assert f"to resume, run the same command with --directory={tmp_path / 'run'} --resume=auto" in notice
    assert (tmp_path / "run" / "checkpoints" / f"step-{step}.index").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "interrupted"
    last = run_forked(*command, cwd=tmp_path)
    assert last.code == 0, last.err
    assert f"resumed at step {step} of {LAST_STEP}" in last.out
    assert_same_end(tmp_path / "run", finished_run.directory)


@pytest.mark.full
def test_a_closed_terminal_stops_it_with_everything_saved(tmp_path):
    """When a terminal closes, the kernel sends SIGHUP, and writing to the terminal fails."""
    command = [sys.executable, "-m", "launch.train", *TINY, "--steps=100000", "--directory=run"]
    command.append("--checkpoint_every_steps=1000000")
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdin=its, stdout=its, stderr=its, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(its)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.poll() is None
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 100_000)
        os.close(ours)
        assert process.wait(60) == 75
    finally:
        process.kill()
        process.wait(20)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['steps']}.index").exists()


@pytest.mark.full
def test_a_dry_run_saves_nothing(tmp_path):
    done = run_forked("-m", "launch.train", *TINY, "--dry_run", "--directory=run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "step 2: evaluation loss " in done.out
    assert listing(tmp_path) == []


@pytest.mark.full
def test_verify(tmp_path):
    flags = (*TINY, "--batch_size=6", "--directory=run")
    good = run_forked("-m", "launch.train", *flags, "--verify", "--precision=auto", cwd=tmp_path)
    assert good.code == 0, good.err
    assert "train: note: --precision=auto: " in good.err
    assert "towers with 2 towers compared with one device, each batch undivided, 20 steps in float64:" in good.out
    assert "\nverified: largest " in good.out
    bad = run_forked("-m", "launch.train", *flags, "--verify", "--verify_tolerance=1e-30", cwd=tmp_path)
    assert bad.code == 3, bad.err
    assert "\nDIFFERS: largest " in bad.out
    assert listing(tmp_path) == []


@pytest.mark.full
def test_a_loss_that_is_not_finite(tmp_path):
    flags = ("--learning_rate=1e30", "--schedule=constant", "--directory=run")
    done = run_forked("-m", "launch.train", *TINY, *flags, cwd=tmp_path)
    assert done.code == 4, done.err
    [line] = done.err.splitlines()
    assert line.startswith("train: error: step ")
    assert "is not finite" in line
    assert "lower the learning rate" in line
    assert "--on_nan=skip" in line
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "not_finite"
