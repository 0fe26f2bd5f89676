"""Runs everything that only a GPU can prove (doctor, tests, benchmark) and packs the outputs into one file.

    python -m tests.gpu.prove --output=gpu-proof.tar.gz
    python -m tests.gpu.prove -- --rounds=1 --peers=PEERS --torch=TORCH/bin/python

Flags after -- are the benchmark's. Each part has a time limit, and the file is written whatever fails, also
after SIGTERM and SIGHUP: it holds each part's output, report.json (exit codes, seconds) and the benchmark's
figures. After SIGKILL it lacks the last part. Without a GPU it says so, and packs that.

Exit code 0 if all parts succeeded on a GPU, otherwise 1.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence

from strategies.atomic_write import write_atomically
from towers.hardware.gpus import memory_bytes

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# The signals that end a part over its time limit, and the wait after each. pytest-xdist waits 10 s for processes
# that a hung kernel holds; with four of them it printed after 13 s why tests failed (two cores), on a busy machine
# later. A GPU's driver can keep a killed process alive: the other parts still run.
_ENDING = ((signal.SIGINT, 40.0), (signal.SIGTERM, 15.0), (signal.SIGKILL, 30.0))
_LOOK_SECONDS = 120.0
# In a container the driver counts no memory by process, so this test measures what all processes use together.
_ALONE = "tests/gpu/test_memory_growth.py"


@dataclasses.dataclass(frozen=True)
class Part:
    """A command to run.

    Attributes:
      name: the name of its output in the file.
      command: arguments of this Python.
      seconds: its time limit.
    """

    name: str
    command: tuple[str, ...]
    seconds: float


def parts(results: pathlib.Path, seconds: float, of_benchmark: Sequence[str]) -> list[Part]:
    """The parts to run, in order.

    Args:
      results: the folder that the benchmark writes into.
      seconds: time limit of the tests, and of the benchmark.
      of_benchmark: further flags of the benchmark.
    """
    # Each check starts a process of its own, and takes at most 7 GiB of the first GPU.
    at_once = (f"--numprocesses={_num_at_once()}", "--dist=worksteal")
    tests = ("-m", "pytest", "-m", "gpu", "-v", "-rA")
    # Half of the time, so that a row that hangs leaves time for the others.
    measured = ("--group=gpu", "--rounds=2", f"--row_timeout_seconds={seconds / 2:g}", f"--output={results}")
    benchmark = ("-m", "launch.benchmark", *measured, *of_benchmark)
    return [
        Part("doctor", ("-m", "launch.doctor"), 120.0),
        Part("memory_growth", (*tests, _ALONE, "--numprocesses=0"), seconds),
        Part("pytest", (*tests, "tests/gpu", f"--ignore={_ALONE}", *at_once), seconds),
        Part("benchmark", benchmark, seconds),
    ]


def _num_at_once() -> int:
    """As many tests as cores and the GPU's memory allow: a check takes two halves of 3 GiB, and CUDA's memory."""
    memory = memory_bytes(0) or 0
    return max(1, min(len(os.sched_getaffinity(0)) // 2, memory // (8 << 30)))


def run(part: Part, folder: pathlib.Path) -> dict:
    """Runs a part, with its output in FOLDER/NAME.txt; leaves no process. Returns its entry in the report."""
    started = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(folder / f"{part.name}.txt", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        is_late = False
        try:
            process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
    return {
        "command": ["python", *part.command],
        "exit_code": process.returncode,
        "timed_out": is_late,
        "seconds": round(time.monotonic() - started, 1),
    }


def _end(process: subprocess.Popen) -> None:
    """Ends the process and all that it started. After SIGINT pytest says why tests failed."""
    for number, seconds in _ENDING:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def gpus(seconds: float = _LOOK_SECONDS) -> list[str]:
    """The GPUs that TensorFlow finds in time, in a process of its own, which frees them when it ends."""
    program = "import tensorflow as tf; print([gpu.name for gpu in tf.config.list_physical_devices('GPU')])"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return []
    return json.loads(done.stdout.replace("'", '"')) if done.returncode == 0 else []


def main(output: pathlib.Path, seconds: float, of_benchmark: Sequence[str]) -> int:
    """Runs all parts and packs them; returns the exit code."""
    return prove(output, gpus(), lambda folder: parts(folder / "benchmark", seconds, of_benchmark))


def prove(output: pathlib.Path, found: list[str], parts_for: Callable[[pathlib.Path], list[Part]]) -> int:
    """Runs the parts that write into a folder, and packs the folder; returns the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "gpu-proof"
        folder.mkdir()
        report = {"gpus": found or "none: TensorFlow finds no GPU, so nothing was proven", "parts": {}}
        print(f"GPUs: {report['gpus']}", flush=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            for part in parts_for(folder):
                # Before each part: if the file can't be written, this fails at once; SIGKILL loses one part only.
                _pack(folder, report, output)
                report["parts"][part.name] = said = run(part, folder)
                print(f"{part.name}: exit code {said['exit_code']}, {said['seconds']} s", flush=True)
        finally:
            _pack(folder, report, output)
            print(f"packed in {output}", flush=True)
    succeeded = all(part["exit_code"] == 0 for part in report["parts"].values())
    return 0 if found and succeeded else 1


def _pack(folder: pathlib.Path, report: dict, output: pathlib.Path) -> None:
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    contents = io.BytesIO()
    with tarfile.open(fileobj=contents, mode="w:gz") as packed:
        packed.add(folder, arcname=folder.name)
    write_atomically(output, contents.getvalue())


def end_on_signals() -> None:
    """SIGTERM, and SIGHUP (a closed terminal) unless it is ignored, end this process after it has packed."""
    signal.signal(signal.SIGTERM, _end_by_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _end_by_signal)
    # A shell's background job ignores SIGINT, and so would the parts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_by_signal(number: int, _) -> None:
    """Exits through the `finally` clauses, which end the part and pack its output."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("gpu-proof.tar.gz"))
    parser.add_argument(
        "--timeout_seconds", type=float, default=1800.0, help="for the tests, and for the benchmark"
    )
    parser.add_argument("of_benchmark", nargs="*", metavar="FLAG", help="after --: flags of launch.benchmark")
    given = parser.parse_args()
    end_on_signals()
    sys.exit(main(given.output, given.timeout_seconds, given.of_benchmark))
