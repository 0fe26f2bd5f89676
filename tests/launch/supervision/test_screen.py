"""A cluster's output on a terminal: one live bar at the bottom, everything else above it."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.launch.clusters import network_flags, wait_until_full
from tests.launch.programs import environment

pytestmark = pytest.mark.timeout(120)

PROGRAM = r"""
import os, sys, time
worker = '"index": 1' in os.environ["TF_CONFIG"]
for step in (5, 10):
    print(f"step {step}/10  loss 0.{step:02d}00  [b]9 examples/s[/b]", flush=True)
    print(f"after {step} [i]not markup[/i]", flush=True)
print("step 10  evaluation  loss 0.5000", flush=True)
print("trouble", file=sys.stderr, flush=True)
sys.exit(3 if worker else 0)
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclasses.dataclass(frozen=True)
class Shown:
    """What the launcher sent to a terminal, its exit code and its current folder."""

    sent: str
    code: int
    folder: pathlib.Path


def on_a_terminal(folder, *, errors=None) -> Shown:
    """Runs a cluster of two workers on a terminal of 100 columns."""
    (folder / "program.py").write_text(PROGRAM)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "launch.local",
            *network_flags(),
            "--workers=2",
            "--",
            "python",
            "program.py",
            "--directory=run",
        ],
        cwd=folder,
        env=environment() | {"TERM": "xterm", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=errors or terminal,
        start_new_session=True,
    )
    os.close(terminal)
    sent = b""
    # Reading from a terminal that every process has closed is an error.
    with contextlib.suppress(OSError):
        while chunk := os.read(controller, 1 << 16):
            sent += chunk
    os.close(controller)
    return Shown(sent.decode(), process.wait(60), folder)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    return on_a_terminal(tmp_path_factory.mktemp("terminal"))


def lines_of(sent: str) -> list[str]:
    """The printed lines without colours; each redrawing of a line is an entry of its own."""
    return [line for line in re.split(r"[\r\n]+", ESCAPES.sub("", sent)) if line]


def test_one_bar_below_the_lines(shown):
    sent, code = shown.sent, shown.code
    assert code == 3
    lines = lines_of(sent)
    bars = [line for line in lines if "━" in line]
    assert any(re.search(r" 5/10 loss 0\.0500  \[b\]9 examples/s\[/b\]", bar) for bar in bars)
    assert re.search(r"10/10 loss 0\.1000", bars[-1])
    printed = [line for line in lines if line.startswith("[worker:")]
    assert not [line for line in printed if line.startswith("[worker:0] step 5/10")], "the bar shows it instead"
    for line in (
        "[worker:0] after 5 [i]not markup[/i]",
        "[worker:0] step 10  evaluation  loss 0.5000",
        "[worker:0] trouble",
        "[worker:1] step 5/10  loss 0.0500  [b]9 examples/s[/b]",
        "[worker:1] trouble",
    ):
        assert printed.count(line) == 1, f"{line!r} in {printed}"
    assert lines.index("[worker:0] after 5 [i]not markup[/i]") < len(lines) - 1 - lines[::-1].index(bars[-1])


def test_process_names_have_colours(shown):
    sent = shown.sent
    colours = {name: set(re.findall(rf"(\x1b\[\d+m)\[{name}\]", sent)) for name in ("worker:0", "worker:1")}
    assert [len(found) for found in colours.values()] == [1, 1]
    assert colours["worker:0"] != colours["worker:1"]


def test_the_terminal_is_restored(shown):
    sent = shown.sent
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l"), "the cursor is shown again"
    assert sent.index("worker:1 failed: exit code 3") > sent.rindex("━"), "the failure report is below the bar"


def test_logs_hold_the_progress_lines(shown):
    assert "step 5/10  loss 0.0500  [b]9 examples/s[/b]\n" in (shown.folder / "run/logs/worker-0.log").read_text()


def test_errors_redirected_to_a_file(tmp_path):
    with (tmp_path / "errors").open("wb") as errors:
        shown = on_a_terminal(tmp_path, errors=errors)
    assert "trouble" not in shown.sent
    text = (tmp_path / "errors").read_text()
    assert "\x1b" not in text
    assert {"[worker:0] trouble", "[worker:1] trouble"} <= set(text.splitlines())


NUM_LINES = 20_000
MANY_LINES = f"""
for number in range({NUM_LINES}):
    print(f"{{number:06d}} and so on")
"""


@pytest.mark.full
def test_a_slow_reader_of_a_pipe_that_another_program_made_non_blocking(tmp_path):
    """A full pipe does not mean that its reader is gone."""
    (tmp_path / "program.py").write_text(MANY_LINES)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    command = [sys.executable, "-m", "launch.local", *network_flags(), "--workers=1", "--", "python", "program.py"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=write_end,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(write_end)
    wait_until_full(read_end)
    with os.fdopen(read_end, "rb") as reader:
        lines = reader.read().splitlines()
    assert process.wait(60) == 0
    assert len(lines) == NUM_LINES
    assert lines[-1] == b"[worker:0] 019999 and so on"
