"""Every program ends with a documented exit code, and reports a user's mistake in one line."""

import os
import subprocess
import sys

import pytest

from launch import binary
from tests.launch.nursery import run_forked
from tests.launch.programs import environment, run, run_many
from towers.errors import UserError

PROGRAM = """
from absl import flags
from launch import binary
from strategies.errors import NonFiniteStep, PeerLost
from towers.errors import UserError
flags.DEFINE_integer("number", 1, "A number.")

def main(arguments):
    number = flags.FLAGS.number
    if number == 2:
        raise UserError("number=2:\\n    it is\\ttoo even; give 1")
    if number == 3:
        raise ValueError("a bug in the program")
    if number == 6:
        raise NonFiniteStep("step 6 is not finite", step=6)
    if number == 7:
        raise PeerLost("worker:1 was lost")
    print("number", number)
    return {4: binary.NOT_FINITE, 5: binary.INTERRUPTED}.get(number)

def cli():
    binary.run(main)
"""


def test_exit_codes_are_documented():
    codes = (
        binary.DONE,
        binary.USER_ERROR,
        binary.DIFFERS,
        binary.NOT_FINITE,
        binary.PEER_LOST,
        binary.INTERRUPTED,
        binary.UNREAD,
    )
    assert codes == (0, 2, 3, 4, 5, 75, 141)
    for code in codes:
        assert f"\n{code} " in binary.__doc__


def test_a_failure_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py"])
    assert binary.fail(UserError("zeros=0:\n  it is at least 1")) == 2
    assert capsys.readouterr().err == "train: error: zeros=0: it is at least 1\n"


def test_a_current_folder_that_was_removed(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as exit:
        binary.run(lambda _: None)
    assert exit.value.code == binary.USER_ERROR
    assert "the current folder can't be found" in capsys.readouterr().err


CASES = (
    ([], 0, "number 1\n", ""),
    (["--number=2"], 2, "", "program: error: --number=2: it is too even; give 1\n"),
    (["--number=4"], 4, "number 4\n", ""),
    (["--number=5"], 75, "number 5\n", ""),
    (["--number=6"], 4, "", "program: error: step 6 is not finite\n"),
    (["--number=7"], 5, "", "program: error: worker:1 was lost\n"),
    (["more"], 2, "", "program: error: argument 'more' is no flag: flags begin with --, see --help\n"),
)


@pytest.mark.timeout(200)
def test_exit_codes_and_output(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    calls = [("program", flags) for flags in (*(flags for flags, *_ in CASES), ["--number=3"])]
    *ended, (bug, _) = run_many(calls, tmp_path)
    for (flags, *expected), (found, _) in zip(CASES, ended, strict=True):
        assert [found.code, found.out, found.err] == expected, flags
    assert bug.code == 1
    assert "Traceback" in bug.err
    assert bug.err.splitlines()[-1] == "ValueError: a bug in the program"


def run_with_output(folder, stdout, flag, *, unbuffered):
    """Runs the program with an open file as its standard output; returns its exit code and its standard error."""
    (folder / "program.py").write_text(f"{PROGRAM}\ncli()\n")
    done = subprocess.run(
        [sys.executable, "program.py", flag],
        cwd=folder,
        env={**environment(), "PYTHONUNBUFFERED": unbuffered},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("flag", "code"), [("--number=1", 141), ("--number=5", 75)])
def test_output_that_nobody_reads(tmp_path, flag, code, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        done = run_with_output(tmp_path, stdout, flag, unbuffered=unbuffered)
    # An unbuffered program fails at its first output, before it has an exit code of its own.
    assert done == (141 if unbuffered else code, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("flag", "code"), [("--number=1", 2), ("--help", 1), ("--number=5", 75)])
def test_a_full_disk_under_the_output(tmp_path, flag, code, unbuffered):
    with open("/dev/full", "w") as stdout:
        done = run_with_output(tmp_path, stdout, flag, unbuffered=unbuffered)
    line = (
        "program: error: standard output can't be written (No space left on device): make room, or redirect it "
        "to another disk\n"
    )
    assert done == (2 if unbuffered else code, line)


FULL_DISK_ELSEWHERE = """
def cli():
    def write(_):
        with open("/dev/full", "w") as file:
            file.write("x")
    binary.run(write)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_that_is_not_the_outputs(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + FULL_DISK_ELSEWHERE)
    [(found, _)] = run_many([("program", [])], tmp_path)
    assert found.code == 1
    assert found.err.splitlines()[-1] == "OSError: [Errno 28] No space left on device"


REDIRECTED = """
def cli():
    import contextlib, io, sys
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            binary.run(main)
        finally:
            print(said.getvalue().upper(), end="", file=sys.stderr)
"""


def test_output_that_a_program_keeps_in_memory(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + REDIRECTED)
    [(found, _)] = run_many([("program", ["--number=4"])], tmp_path)
    assert (found.code, found.err) == (4, "NUMBER 4\n")


COMMANDS = (
    (
        ["--number=7", "--", "python", "-m", "train", "--number=8", "--", "x"],
        0,
        "7 python -m train --number=8 -- x\n",
    ),
    (["--"], 0, "1\n"),
    ([], 0, "1\n"),
    (["python", "--", "x"], 2, ""),
    (["--unknown", "--", "x"], 2, ""),
    (["python", "-m", "train"], 2, ""),
)


@pytest.mark.timeout(200)
def test_a_command_follows_a_lone_double_dash(tmp_path):
    """Flags after -- belong to the command, and so does a second --."""
    text = PROGRAM.replace("binary.run(main)", "binary.run(print_all, takes_command=True)")
    text += "\ndef print_all(arguments):\n    print(flags.FLAGS.number, *arguments[1:])\n"
    (tmp_path / "program.py").write_text(text)
    found = run_many([("program", flags) for flags, *_ in COMMANDS], tmp_path)
    for (flags, *expected), (ended, _) in zip(COMMANDS, found, strict=True):
        assert [ended.code, ended.out] == expected, (flags, ended.err)
    assert "'python' is no flag" in found[3][0].err
    assert "put -- before the command" in found[3][0].err
    assert "'m'; put -- before the command" in found[5][0].err
    assert "before the command" not in found[4][0].err


STOPPED = """
import importlib, os, signal, sys

program = importlib.import_module("launch." + sys.argv.pop())
program.main = lambda _: os.kill(os.getpid(), signal.SIGTERM)
# There is no run whose flags launch.evaluate could load.
program.load_run = lambda: None
program.cli()
"""


CAUGHT = """
import os, signal
from launch import train

trains = train.main


def main(arguments):
    for number in (signal.SIGTERM, signal.SIGHUP):
        try:
            os.kill(os.getpid(), number)
        except:  # as some libraries have it
            print("caught", flush=True)
    return trains(arguments)


train.main = main
train.cli()
"""


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_signal_that_a_library_caught_stops_the_training(tmp_path):
    (tmp_path / "caught.py").write_text(CAUGHT)
    done = run("caught.py", "--model=tiny", "--steps=100000", "--directory=run", cwd=tmp_path)
    assert done.code == 75, done.err
    assert done.out.count("caught\n") == 2
    assert "SIGTERM: stopped at step" in done.out


@pytest.mark.full
@pytest.mark.timeout(200)
def test_only_programs_that_train_speak_of_checkpoints_when_they_are_stopped(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)
    train, *others = (run_forked("stopped.py", name, cwd=tmp_path) for name in ("train", "memory", "evaluate"))
    line = "stopped: interrupted by SIGTERM: the same command starts again"
    assert (train.code, train.err) == (75, f"{line}, from the last checkpoint if there is one\n")
    assert [(other.code, other.err) for other in others] == [(75, f"{line}\n")] * 2
