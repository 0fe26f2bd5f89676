"""The check of free space and write permission, which writes a temporary file."""

import collections
import shutil
import tempfile

import pytest

from launch.health.disk import ENOUGH_BYTES, disk


@pytest.fixture(autouse=True)
def much_space(monkeypatch):
    """10 GiB are free, however full this machine's disk is."""
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 10 * 2**30))


def test_no_problem(tmp_path):
    found = disk(str(tmp_path))
    assert found.problems == ()
    assert found.facts["directory"] == str(tmp_path)
    assert found.facts["directory free GiB"] == found.facts["temporary folder free GiB"] == "10.0"
    assert found.facts["temporary folder"] == tempfile.gettempdir()
    assert list(tmp_path.iterdir()) == [], "the check must leave no file behind"


def test_a_directory_that_does_not_exist_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = disk("a/b/c")
    assert found.problems == ()
    assert found.facts["directory"] == f"a/b/c, will be created in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


# Not even root can write there.
@pytest.mark.parametrize("directory, present", [("/proc/run", "/proc"), ("/dev/null/run", "/dev/null")])
def test_a_directory_that_is_not_writable(directory, present):
    (problem,) = disk(directory).problems
    assert problem.startswith(f"--directory={directory}: {present} is not writable (")
    assert problem.endswith("); choose a writable folder")


@pytest.mark.parametrize("name, why", [("x" * 300, "File name too long"), ("a\0b", "embedded null")])
def test_a_directory_that_no_file_can_have(name, why, tmp_path):
    (problem,) = disk(str(tmp_path / name)).problems
    assert why in problem and problem.endswith("; choose another folder")


def test_a_file_instead_of_a_directory(tmp_path):
    (tmp_path / "run").write_text("")
    (problem,) = disk(str(tmp_path / "run")).problems
    assert "(Not a directory)" in problem


def test_little_free_space(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, ENOUGH_BYTES - 2**30))
    of_directory, of_temporary = disk(str(tmp_path)).problems
    problem = "only 1.0 GiB are free, and a run may need 2.0 GiB; free some space or use another disk"
    assert of_directory == f"--directory={tmp_path}: {problem}"
    assert of_temporary == f"the temporary folder {tempfile.gettempdir()}: {problem}"


def test_no_temporary_folder(tmp_path, monkeypatch):
    def gettempdir():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    assert "no usable temporary folder" in disk(str(tmp_path)).problems[0]
    assert "set TMPDIR" in disk(str(tmp_path)).problems[0]
