"""Sums over replicas and over processes with GPUs."""

import subprocess
import sys

import pytest

from launch.measuring.gpu_cases import num_gpus
from tests.gpu.fresh_process import STAND_IN, run_check
from tests.gpu.reported_losses import reported_losses

pytestmark = pytest.mark.gpu
# The tolerance of `tests.gpu.checks.numbers`.
_TOLERANCE = 2e-3
_TIMEOUT_SECONDS = 240


def test_mirrored_falls_back_where_nccl_cannot_serve():
    run_check("collectives", "fallback_of_nccl")


def test_mirrored_on_one_of_two_logical_gpus():
    run_check("collectives", "nccl_on_one_whole_gpu")


def test_a_ring_of_two_processes_with_a_gpu_each_over_tcp(tmp_path):
    """Its losses are near those of the same ring on CPUs."""
    if not STAND_IN and num_gpus() < 2:
        pytest.skip("two processes need a GPU each")
    losses = {}
    for kind in ("cpu", "cpu" if STAND_IN else "gpu"):
        directory = tmp_path / f"{kind}{len(losses)}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "launch.local", "--workers=2", "--"),
                *(sys.executable, "-m", "launch.train", "--strategy=ring", "--engine=own", "--all_reduce=tcp"),
                *(f"--tower_device={kind}", "--num_towers=1", "--task=shapes", "--model=tiny", "--augment"),
                *("--batch_size=64", "--steps=20", f"--directory={directory}"),
            ],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        losses[directory.name] = reported_losses(directory)[-1]
    first, second = losses.values()
    assert second == pytest.approx(first, rel=_TOLERANCE)
