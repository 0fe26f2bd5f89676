"""Programs started as users start them: processes with a time limit, none of which is left behind."""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 120

# A second or two of training, with several checkpoints: long enough to be interrupted in the middle.
LAST_STEP = 60
TINY = (
    "--task=shapes",
    "--model=tiny",
    "--learning_rate=0.02",
    "--batch_size=8",
    "--num_towers=2",
    "--threads_per_tower=1",
    f"--steps={LAST_STEP}",
    "--checkpoint_every_steps=5",
    "--report_every_steps=1",
)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def errors(ended: Ended) -> list[str]:
    """The error lines of our program; TensorFlow may write other lines to stderr too."""
    return [line for line in ended.err.splitlines() if re.match(r"\w+: error: ", line)]


def environment() -> dict[str, str]:
    """This process's environment without GPUs and without the TensorFlow log level that conftest sets."""
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return inherited | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "TMPDIR": _temporary_files()}


@functools.cache
def _temporary_files() -> str:
    """A folder that is removed at the end: killed programs leave TensorFlow's temporary files in it."""
    folder = tempfile.mkdtemp(prefix="towers-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def started(*command: str, cwd: pathlib.Path) -> Iterator[subprocess.Popen]:
    """Context manager: runs `python command...`; kills it at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def ended(process: subprocess.Popen, *, limit_seconds: float = LIMIT_SECONDS) -> Ended:
    """Waits until the process has ended."""
    out, err = process.communicate(timeout=limit_seconds)
    return Ended(process.returncode, out, err)


def run(*command: str, cwd: pathlib.Path) -> Ended:
    """Runs `python command...` to its end."""
    with started(*command, cwd=cwd) as process:
        return ended(process)


def wait_for(path: pathlib.Path, process: subprocess.Popen) -> None:
    """Waits until the file exists; fails if the process ends first."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not exist after {LIMIT_SECONDS} seconds"
        if process.poll() is not None:
            output = process.communicate() if process.stdout else ""
            raise AssertionError(f"the process ended with {process.returncode} before {path} existed: {output}")
        time.sleep(0.005)


def checkpoint_values(directory: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """The values in a run's checkpoint by TensorFlow's key, without TensorFlow's own entries."""
    reader = tf.train.load_checkpoint(str(directory / "checkpoints" / f"step-{step}"))
    prefixes = ("parameters/", "state/", "slots/", "counters/")
    return {
        key: np.asarray(reader.get_tensor(key))
        for key in reader.get_variable_to_shape_map()
        if key.startswith(prefixes)
    }


def assert_same_end(directory: pathlib.Path, expected: pathlib.Path) -> None:
    """Asserts that the last checkpoints of two runs are bit-equal."""
    found, wanted = (checkpoint_values(run, LAST_STEP) for run in (directory, expected))
    assert found.keys() == wanted.keys()
    assert {key.partition("/")[0] for key in wanted} >= {"parameters", "slots", "counters"}
    apart = {
        key: float(np.abs(found[key].astype(np.float64) - wanted[key]).max())
        for key in wanted
        if found[key].tobytes() != wanted[key].tobytes()
    }
    assert not apart, f"not bit-equal, largest differences: {apart}"


def listing(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Imports TensorFlow once. Each call runs in a fork of this process, which has computed nothing.
_MANY = """
import gc, importlib, json, os, sys
from tests.launch.forked_child import become
calls = json.load(open(sys.argv[1]))
modules = {call["module"]: importlib.import_module(call["module"]) for call in calls}
gc.collect()
gc.freeze()  # as tests.launch.nursery does
for call in calls:
    child = os.fork()
    if child == 0:
        sys.argv = [call["module"].rpartition(".")[2] + ".py", *call["flags"]]
        become(modules[call["module"]].cli, **call["process"])
    _, status = os.waitpid(child, 0)
    call["code"] = os.waitstatus_to_exitcode(status)
json.dump(calls, open(sys.argv[1], "w"))
"""


def run_many(calls: Sequence[tuple[str, Sequence[str]]], folder: pathlib.Path) -> list[tuple[Ended, pathlib.Path]]:
    """Runs each (module, flags) in turn, each in an empty folder of its own; returns the ends and the folders."""
    described = []
    for index, (module, flags) in enumerate(calls):
        cwd = folder / f"call{index}"
        cwd.mkdir()
        files = {name: str(folder / f"{index}.{name}") for name in ("out", "err")}
        process = {"cwd": str(cwd), "limit_seconds": LIMIT_SECONDS, **files}
        described.append({"module": module, "flags": list(flags), "process": process})
    (folder / "calls.json").write_text(json.dumps(described))
    whole = run("-c", _MANY, str(folder / "calls.json"), cwd=folder)
    assert whole.code == 0, whole.err
    results = []
    for call in json.loads((folder / "calls.json").read_text()):
        out, err = (pathlib.Path(call["process"][name]).read_text() for name in ("out", "err"))
        results.append((Ended(call["code"], out, err), pathlib.Path(call["process"]["cwd"])))
    return results
