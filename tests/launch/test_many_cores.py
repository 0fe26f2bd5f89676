"""Training as on a machine with 64 cores: its number of towers and threads, on the cores that are here."""

import re
import sys

import pytest

from tests.launch.nursery import run_forked

# Replaces what reads the number of cores, before the flags are parsed.
_PROGRAM = """
import os, runpy, sys
import launch
from launch.flags import devices as flags_of_devices
from towers import device_setup

device_setup.num_cores = flags_of_devices.num_cores = lambda: 64
sys.argv = ["train", *sys.argv[1:]]
try:
    runpy.run_module("launch.train", run_name="__main__")
finally:
    found = flags_of_devices.devices_from_flags()
    threads = len(os.listdir("/proc/self/task"))
    print(f"found {found.num_towers} towers of {found.threads_per_tower}; at least 128 threads: {threads >= 128}")
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")
def test_64_cores_train_a_batch_of_256_in_eight_towers_of_eight_threads(tmp_path):
    """64 threads start operations, 64 compute them. In one pool, TensorFlow's default, eight would compute."""
    flags = ("--task=shapes", "--model=tiny", "--batch_size=256", "--tower_device=cpu", "--steps=3")
    (tmp_path / "program.py").write_text(_PROGRAM)
    ended = run_forked("program.py", *flags, f"--directory={tmp_path / 'run'}", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert re.search(r"found 8 towers of 8; at least 128 threads: True", ended.out)
