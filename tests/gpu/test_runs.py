"""Runs from the command line: which processes get a GPU, and that the same command gives the same bits."""

import subprocess
import sys
import time

import pytest

from launch.measuring.gpu_cases import num_gpus
from tests.gpu.fresh_process import STAND_IN
from tests.gpu.reported_losses import reported_losses

pytestmark = pytest.mark.gpu
_TIMEOUT_SECONDS = 240
_ON = "--tower_device=cpu" if STAND_IN else "--tower_device=gpu"
# ResNet-20 has batch norms before ReLUs, which TensorFlow's graph optimizer joins for CPUs.
_TRAIN = (
    sys.executable,
    "-m",
    "launch.train",
    "--task=shapes",
    "--model=resnet20",
    "--batch_size=32",
    "--steps=4",
)


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)


def _cluster(*members: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "launch.local", *members, "--")


@pytest.mark.parametrize("engine", ["tensorflow", "own"])
def test_a_worker_of_parameter_servers_computes_on_its_gpu(engine, tmp_path):
    cluster = _cluster("--workers=1", "--ps=1", "--chief")
    done = _run(*cluster, *_TRAIN, "--strategy=ps", f"--engine={engine}", _ON, f"--directory={tmp_path}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    log = (tmp_path / "logs" / "worker-0.log").read_text()
    assert STAND_IN or "1 tower on gpu:0" in log, log


@pytest.mark.skipif(STAND_IN, reason="CPUs don't compile by default")
def test_one_gpu_compiles_the_step(tmp_path):
    """The losses of some steps, with and without XLA.

    At the usual rate the fourth loss of so small a batch is 15, and another rounding changes it by a hundredth.
    """
    losses = []
    for name, flags in (("compiled", ()), ("not", ("--noxla",))):
        directory = tmp_path / name
        done = _run(
            *_TRAIN, _ON, "--num_towers=1", "--notf32", "--learning_rate=0.001", *flags, f"--directory={directory}"
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert ("XLA compiles the step" in done.stdout) is (name == "compiled")
        losses.append(reported_losses(directory))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_several_steps_in_an_execution_of_one_gpu(tmp_path):
    """The losses of three reports are those of one step at a time. On a GPU XLA compiles the steps."""
    losses = []
    for count in (1, 4):
        directory = tmp_path / str(count)
        flags = (f"--steps_per_execution={count}", "--report_every_steps=6", f"--directory={directory}")
        done = _run(*_TRAIN, _ON, "--num_towers=1", "--steps=18", "--notf32", "--learning_rate=0.001", *flags)
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(reported_losses(directory))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_one_gpu_is_verified():
    done = _run(*_TRAIN, _ON, "--num_towers=1", "--augment", "--verify")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_deterministic_run_gives_the_same_numbers_again(tmp_path):
    losses = []
    for name in ("first", "second"):
        directory = tmp_path / name
        done = _run(*_TRAIN, _ON, "--augment", "--deterministic", f"--directory={directory}")
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(reported_losses(directory))
    assert losses[0] and losses[0] == losses[1]


@pytest.mark.skipif(STAND_IN, reason="all processes share the CPUs")
def test_more_workers_than_gpus_end_with_one_line(tmp_path):
    count = num_gpus()
    cluster = _cluster(f"--workers={count + 1}")
    done = _run(*cluster, *_TRAIN, "--strategy=ring", _ON, f"--directory={tmp_path}")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert f"{count + 1} processes of this machine find {count} GPU" in said
    assert "Traceback" not in said


@pytest.mark.skipif(STAND_IN, reason="shows what the driver knows of a process")
def test_towers_on_cpus_start_no_gpu(tmp_path):
    command = [*_TRAIN, "--tower_device=cpu", f"--directory={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    started, seen = time.monotonic(), set()
    try:
        while process.poll() is None:
            assert time.monotonic() - started < _TIMEOUT_SECONDS
            seen |= _processes_on_gpus()
            time.sleep(0.5)
    finally:
        process.kill()
        process.wait(_TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert process.pid not in seen


def _processes_on_gpus() -> set[int]:
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return {int(line) for line in said.split() if line.isdecimal()}
