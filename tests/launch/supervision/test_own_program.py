"""Our own programs don't import from the current folder; a user's program does."""

import os
import site
import subprocess
import sys

import pytest

from launch.supervision import own_program as own_program_file
from launch.supervision.own_program import own_program
from tests.launch.clusters import network_flags
from tests.launch.programs import ROOT, environment
from tests.launch.shadowing import write_intruders

pytestmark = pytest.mark.timeout(120)


def test_the_command_and_its_variables(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command, variables = own_program("launch.train", "--steps=3")
    assert command == (sys.executable, "-P", "-m", "launch.train", "--steps=3")
    assert variables == {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    "given, expected",
    [
        (f"a{os.pathsep}b", [str(ROOT), "a", "b"]),
        (f"a{os.pathsep}{ROOT}", [str(ROOT), "a"]),
        # An empty entry is the current folder.
        (f"{os.pathsep}a{os.pathsep}", [str(ROOT), "a"]),
    ],
)
def test_our_packages_precede_what_pythonpath_names(monkeypatch, given, expected):
    monkeypatch.setenv("PYTHONPATH", given)
    assert own_program("launch.train")[1] == {"PYTHONPATH": os.pathsep.join(expected)}


def test_installed_packages_are_not_put_before_the_standard_library(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "a")
    monkeypatch.setattr(own_program_file, "_ROOT", os.path.realpath(site.getsitepackages()[0]))
    assert own_program("launch.train")[1] == {"PYTHONPATH": "a"}


def launched(folder, *command: str) -> subprocess.CompletedProcess:
    """Runs a command as a cluster's only worker, under a launcher that does not import from the folder."""
    inherited = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-P", "-c", START, *network_flags(), "--workers=1", "--", *command],
        cwd=folder,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=100,
    )


# Starts the launcher as the console script `towers-local` does. PYTHONPATH would reach the processes too.
START = f"import sys; sys.path.append({str(ROOT)!r}); from launch import local; local.cli()"


@pytest.mark.full
def test_a_clusters_processes_ignore_the_folder_where_they_run_our_program(tmp_path):
    write_intruders(tmp_path)
    done = launched(tmp_path, "python", "-m", "launch.train", "--steps=0")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("[worker:0] train: error: "), done.stderr


@pytest.mark.parametrize("words", [("users_program.py",), ("-m", "users_program")], ids=["file", "module"])
def test_a_users_program_imports_its_own_modules(tmp_path, words):
    (tmp_path / "users_program.py").write_text("import user_models; print(user_models.NAME)\n")
    (tmp_path / "user_models.py").write_text('NAME = "mine"\n')
    done = launched(tmp_path, "python", *words)
    assert (done.returncode, done.stdout) == (0, "[worker:0] mine\n"), done.stderr
