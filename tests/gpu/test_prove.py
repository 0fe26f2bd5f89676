"""The script packs every part's output, also if the part fails or hangs. (These tests need no GPU.)"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from tests.gpu import prove as proving
from tests.gpu.prove import Part, prove
from tests.launch.nursery import forked
from tests.tiers import first_quick

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# As prove's last lines, with one part that prints its process id and hangs; writes the parts' folder into a file.
_HANGS = """
import pathlib, sys
from tests.gpu import prove as proving

def parts(folder):
    with open(sys.argv[2], "w") as named:
        print(folder, file=named)
    said = ("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    return [proving.Part("first", ("-c", "print('fine')"), 60.0), proving.Part("hangs", said, 600.0)]

proving.end_on_signals()
proving.prove(pathlib.Path(sys.argv[1]), [], parts)
"""


class _Held:
    """A killed process that the system does not end."""

    def __init__(self, pid: int):
        self.pid = pid

    def wait(self, seconds: float):
        raise subprocess.TimeoutExpired("held", seconds)


def test_all_outputs_are_packed_whatever_fails(tmp_path):
    output = tmp_path / "proof.tar.gz"
    said = [
        Part("good", ("-c", "print('fine')"), 60.0),
        Part("bad", ("-c", "import sys; print('broken'); sys.exit(3)"), 60.0),
        Part("late", ("-c", "import time; print('begun', flush=True); time.sleep(600)"), 2.0),
    ]
    assert prove(output, ["/physical_device:GPU:0"], lambda folder: said) == 1
    with tarfile.open(output) as packed:
        text = {
            name: packed.extractfile(f"gpu-proof/{name}.txt").read().decode() for name in ("good", "bad", "late")
        }
        report = json.load(packed.extractfile("gpu-proof/report.json"))
    # After the first line Python prints where SIGINT interrupted it.
    assert [text[name].splitlines()[0] for name in ("good", "bad", "late")] == ["fine", "broken", "begun"]
    assert [part["exit_code"] for part in report["parts"].values()] == [0, 3, -signal.SIGINT]
    assert [part["timed_out"] for part in report["parts"].values()] == [False, False, True]


def test_success_needs_a_gpu(tmp_path):
    said = [Part("good", ("-c", ""), 60.0)]
    codes = [prove(tmp_path / f"{len(found)}.tar.gz", found, lambda folder: said) for found in (["a GPU"], [])]
    assert codes == [0, 1]


@pytest.mark.full
@pytest.mark.parametrize(
    "num_processes, seconds, on_sigint", [(0, 15.0, "default_int_handler"), (2, 40.0, "SIG_IGN")]
)
def test_tests_that_are_over_their_time_say_why_others_failed(tmp_path, num_processes, seconds, on_sigint):
    """Also if SIGINT ends no test process. On busy machines pytest's processes start in over eight seconds."""
    tests = tmp_path / "test_two.py"
    tests.write_text(
        "import signal, time\n"
        "def test_bad():\n    assert 'the cause' == ''\n"
        f"def test_late():\n    signal.signal(signal.SIGINT, signal.{on_sigint})\n    time.sleep(600)\n"
    )
    said = ("-m", "pytest", str(tests), "-p", "no:cacheprovider", f"--numprocesses={num_processes}")
    part = Part("pytest", (*said, "--dist=worksteal", f"--rootdir={tmp_path}"), seconds)
    assert proving.run(part, tmp_path)["timed_out"]
    assert "assert 'the cause' == ''" in (tmp_path / "pytest.txt").read_text()


@pytest.mark.parametrize("number", first_quick([signal.SIGTERM, signal.SIGHUP]), ids=lambda number: number.name)
def test_a_signal_ends_the_part_and_packs_it(tmp_path, number):
    output, program, named = tmp_path / "proof.tar.gz", tmp_path / "program.py", tmp_path / "folder"
    program.write_text(_HANGS)
    with forked(str(program), str(output), str(named), cwd=_ROOT) as process:
        folder = pathlib.Path(_text_when_written(named).strip())
        said = _text_when_written(folder / "hangs.txt")
        # The earlier part is in the file already: SIGKILL would not lose it.
        assert _packed(output, "first").strip() == "fine"
        process.send_signal(number)
        process.wait(60)
    assert process.returncode == 128 + number
    assert _packed(output, "hangs").startswith(said)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(said), signal.SIGKILL)
        raise AssertionError("the part still runs")


def test_the_files_folder_is_made(tmp_path):
    output = tmp_path / "new" / "proof.tar.gz"
    assert prove(output, ["a GPU"], lambda folder: [Part("good", ("-c", "print('fine')"), 60.0)]) == 0
    assert _packed(output, "good").strip() == "fine"


def test_a_pack_that_breaks_off_leaves_the_one_before(tmp_path, monkeypatch):
    output = tmp_path / "proof.tar.gz"
    assert prove(output, ["a GPU"], lambda folder: [Part("good", ("-c", "print('fine')"), 60.0)]) == 0

    def add(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "add", add)
    with pytest.raises(KeyboardInterrupt):
        proving._pack(tmp_path, {}, output)
    assert _packed(output, "good").strip() == "fine"


def test_a_process_that_the_driver_holds_is_left():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    proving._end(_Held(ended.pid))


def test_gpus_that_are_not_found_in_time_are_none():
    assert proving.gpus(seconds=0.01) == []


@pytest.mark.full
def test_memory_growth_is_measured_while_no_other_test_runs(tmp_path):
    of_pytest = {part.name: part.command for part in proving.parts(tmp_path, 60.0, ()) if "pytest" in part.command}
    for name, expected in (("memory_growth", True), ("pytest", False)):
        collected = subprocess.run(
            [sys.executable, *of_pytest[name], "--collect-only", "--numprocesses=0"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        assert ("test_a_process_leaves_the_rest_of_the_gpu" in collected) is expected, collected
        assert ("test_20_steps_beside_the_cpu" in collected) is (not expected), collected


def test_a_row_that_hangs_leaves_the_others_time(tmp_path):
    *_, benchmark = proving.parts(tmp_path, 1800.0, ("--rounds=1",))
    assert "--row_timeout_seconds=900" in benchmark.command
    assert benchmark.command[-1] == "--rounds=1", "the last one counts"


def _packed(output: pathlib.Path, name: str) -> str:
    with tarfile.open(output) as packed:
        return packed.extractfile(f"gpu-proof/{name}.txt").read().decode()


def _text_when_written(path: pathlib.Path) -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return path.read_text()
