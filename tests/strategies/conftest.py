"""Fixtures of the tests of strategies: a finished run that they share, and small disks."""

import dataclasses
import os
import pathlib
import shutil
import subprocess

import pytest

from strategies.contract import Strategy
from strategies.reports.profiler import Profiler
from strategies.training.trainer import FitResult, Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import random_task, small_strategy


@dataclasses.dataclass(frozen=True)
class KeptRun:
    """A finished run, which tests must not change.

    Attributes:
      directory: folder of its files.
      result: the result of `fit`.
      strategy: the strategy after the run.
      options: the Trainer's options.
    """

    directory: pathlib.Path
    result: FitResult
    strategy: Strategy
    options: TrainerOptions


@pytest.fixture(scope="session")
def kept_run(tmp_path_factory) -> KeptRun:
    """12 steps on two towers: a checkpoint every 2 steps, an evaluation every 4, steps 6 to 8 profiled."""
    directory = tmp_path_factory.mktemp("kept") / "run"
    options = TrainerOptions(
        steps=12,
        directory=directory,
        checkpoint_every_steps=2,
        evaluate_every_steps=4,
        evaluate_every_epochs=None,
        report_every_steps=2,
    )
    strategy = small_strategy(random_task(), num_towers=2)
    trainer = Trainer(strategy, options, callbacks=[Profiler(6, 8)], settings={"learning_rate": 0.05})
    return KeptRun(directory, trainer.fit(), strategy, options)


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a disk of the given size in KiB and returns its folder."""
    if os.geteuid() != 0:
        pytest.skip("the small disk of this test is a tmpfs, and only root may mount one")
    mounted = []

    def mount(kibibytes: int) -> pathlib.Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if done.returncode != 0:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture
def fill():
    """A function that writes a file until its disk is full."""

    def fill_disk(path: pathlib.Path) -> None:
        with open(path, "wb", buffering=0) as file:
            free = shutil.disk_usage(path.parent).free
            try:
                while free > 0:
                    free -= file.write(b"x" * min(free, 1 << 16))
            except OSError:
                pass

    return fill_disk
