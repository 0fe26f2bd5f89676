"""SIGTERM and Ctrl-C while a program imports TensorFlow: one line and exit code 75."""

import os
import signal
import time

import pytest

from tests.launch.programs import ended, run, started

DIES = "import os, signal\nos.write(2, b'a notice\\n')\nos.kill(os.getpid(), signal.{})\nraise ImportError\n"


@pytest.fixture(params=["SIGTERM", "SIGINT", "SIGHUP"])
def number(request, tmp_path):
    """A signal; a module `tensorflow` in the folder sends it to the process that imports the module."""
    (tmp_path / "tensorflow.py").write_text(DIES.format(request.param))
    return request.param


def line(program, number):
    return f"{program}: interrupted by {number} during start-up: the same command starts again\n"


def own_line(number):
    return (
        f"own: interrupted by {number}: the same command starts again, from the last checkpoint if there is one\n"
    )


def test_a_program_of_ours(tmp_path, number):
    done = run("-m", "launch.train", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (75, "", line("train", number))


def test_a_script_of_a_users_own(tmp_path, number):
    (tmp_path / "own.py").write_text("print('begins')\nfrom launch import binary, training\n")
    done = run("own.py", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (75, "begins\n", own_line(number))


def test_a_script_of_a_users_own_after_its_imports(tmp_path):
    (tmp_path / "own.py").write_text("import launch, os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    done = run("own.py", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (75, "", own_line("SIGTERM"))


def test_the_handlers_come_before_other_imports_of_launch(tmp_path):
    (tmp_path / "logging.py").write_text(DIES.format("SIGTERM"))
    done = run("-m", "launch.train", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (75, "", "a notice\n" + line("train", "SIGTERM"))


def test_a_module_of_a_script_sets_no_handlers(tmp_path):
    (tmp_path / "module.py").write_text("import launch\n")
    program = "import module, signal\nprint(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)\n"
    (tmp_path / "own.py").write_text(program)
    assert run("own.py", cwd=tmp_path).out == "True\n"


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0, 4.0])
def test_at_any_moment_of_a_real_start(tmp_path, seconds):
    with started("-m", "launch.train", "--steps=100000", "--directory=run", cwd=tmp_path) as process:
        time.sleep(seconds)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        done = ended(process)
    assert done.code == 75
    assert len(done.err.splitlines()) <= 1
