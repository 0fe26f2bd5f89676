"""The memory of a GPU, asked of a driver's library that a test compiles."""

import shutil
import subprocess

import pytest
import tensorflow as tf

from towers.hardware.gpus import Gpu, gpus_are_whole, memory_bytes

DRIVER = """
int cuInit(unsigned flags) { return %d; }
int cuDeviceGet(int *device, int index) { *device = index + 7; return 0; }
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = (device - 7) * (16ul << 30); return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("result, found", [(0, 48 << 30), (100, None)])
def test_the_driver_says_how_much_memory_a_gpu_has(tmp_path, result, found):
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER % result)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    assert memory_bytes(3, str(library)) == found


@pytest.mark.parametrize("library", ["no-such-library.so.1", "libc.so.6"])
def test_without_a_driver_the_memory_is_unknown(library):
    assert memory_bytes(0, library) is None


def test_a_gpu_in_words():
    gpu = Gpu(index=0, model="NVIDIA H100", compute_capability=(9, 0))
    assert gpu.described == "NVIDIA H100, compute capability 9.0"
    assert Gpu(index=0).described.endswith("compute capability unknown")


@pytest.mark.parametrize(
    "num_logical, num_visible, expected",
    [(2, 2, True), (1, 1, True), (2, 1, False), (4, 2, False)],
)
def test_a_hidden_gpu_does_not_make_the_halves_of_another_whole(monkeypatch, num_logical, num_visible, expected):
    """The machine has four GPUs."""
    for name, count in (
        ("list_physical_devices", 4),
        ("get_visible_devices", num_visible),
        ("list_logical_devices", num_logical),
    ):
        monkeypatch.setattr(tf.config, name, lambda kind, count=count: [kind] * count)
    assert gpus_are_whole() is expected
