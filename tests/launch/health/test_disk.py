"""Room and the right to write, found out by writing."""

import collections
import shutil
import tempfile

import pytest

from launch.health.disk import ENOUGH_BYTES, disk


@pytest.fixture(autouse=True)
def much_room(monkeypatch):
    """Whatever this machine has left."""
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 10 * 2**30))


def test_all_is_well(tmp_path):
    found = disk(str(tmp_path))
    assert found.problems == ()
    assert found.facts["directory"] == str(tmp_path)
    assert found.facts["directory free GiB"] == found.facts["temporary folder free GiB"] == "10.0"
    assert found.facts["temporary folder"] == tempfile.gettempdir()
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_directory_that_is_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = disk("a/b/c")
    assert found.problems == ()
    assert found.facts["directory"] == f"a/b/c, to be made in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


# What not even root can write to.
@pytest.mark.parametrize("directory, present", [("/proc/run", "/proc"), ("/dev/null/run", "/dev/null")])
def test_where_nothing_can_be_written(directory, present):
    (problem,) = disk(directory).problems
    assert problem.startswith(f"--directory={directory}: {present} can't be written (")
    assert problem.endswith("); give a folder that can be written")


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "run").write_text("")
    (problem,) = disk(str(tmp_path / "run")).problems
    assert "(Not a directory)" in problem


def test_little_room(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, ENOUGH_BYTES - 2**30))
    of_directory, of_temporary = disk(str(tmp_path)).problems
    said = "1.0 GiB are free, and 2.0 are wanted: make room or take another disk"
    assert of_directory == f"--directory={tmp_path}: {said}"
    assert of_temporary == f"the temporary folder {tempfile.gettempdir()}: {said}"


def test_no_temporary_folder(tmp_path, monkeypatch):
    def gettempdir():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    assert "there is no temporary folder" in disk(str(tmp_path)).problems[0]
    assert "set TMPDIR" in disk(str(tmp_path)).problems[0]
