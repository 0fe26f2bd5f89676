"""The doctor's sections on versions, devices and threads, and the problems they report."""

import importlib.metadata
import os
import platform

import pytest
import tensorflow as tf

import towers
from launch.health import machine, versions
from tests.towers.control_group_files import linux


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda *_: 8)


@pytest.fixture
def no_gpu(monkeypatch):
    of_kind = tf.config.list_physical_devices
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: of_kind(kind) if kind == "CPU" else [])


def test_versions():
    found = versions.versions()
    assert found.problems == ()
    for package in ("tensorflow", "keras", "tensorflow-datasets", "numpy"):
        assert found.facts[package] == importlib.metadata.version(package)
    assert found.facts["python"].startswith(platform.python_version())
    assert found.facts["keras backend"] == "tensorflow"


@pytest.mark.parametrize(
    "distribution, words", [("numpy", ""), ("no-such-package", ", not installed: runs from its source folder")]
)
def test_own_version_is_reported_also_when_not_installed(monkeypatch, distribution, words):
    monkeypatch.setattr(versions, "DISTRIBUTION", distribution)
    assert versions.versions().facts["towers"] == towers.__version__ + words


def test_a_missing_package(monkeypatch):
    monkeypatch.setattr(versions, "PACKAGES", ("numpy", "no-such-package"))
    found = versions.versions()
    assert found.facts["no-such-package"] == "not installed"
    assert found.problems == ("no-such-package is required but not installed; run pip install no-such-package",)


def test_a_package_of_another_version(monkeypatch):
    needed = ["absl-py>=1", "numpy>=99", "no-such-package>=1", 'pytest>=99; extra == "test"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda distribution: needed)
    (problem,) = versions.versions().problems
    installed = importlib.metadata.version("numpy")
    assert problem == (
        f"numpy {installed} is installed, and towers-training needs numpy>=99: run pip install 'numpy>=99'"
    )


@pytest.mark.parametrize(
    "build, fact",
    [
        ({"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}, "CUDA 12.5.1, cuDNN 9"),
        (
            {
                "is_cuda_build": True,
                "cuda_version": "12",
                "cudnn_version": "9",
                "cuda_compute_capabilities": ["sm_80"],
            },
            "CUDA 12, cuDNN 9, compute capabilities sm_80",
        ),
        ({"is_rocm_build": True, "rocm_version": "6.1"}, "ROCm 6.1"),
        ({"is_cuda_build": False}, "CPU only"),
    ],
)
def test_what_tensorflow_was_built_for(monkeypatch, build, fact):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    assert versions.versions().facts["tensorflow built for"] == fact


def test_devices(no_gpu, eight_cores, tmp_path):
    found = machine.devices({}, root=tmp_path, signs=())
    assert found.problems == ()
    assert found.facts["CPUs"] == ["/physical_device:CPU:0"]
    assert found.facts["GPUs"] == "none"
    assert found.facts["cores"].startswith("8 usable of ")
    assert "quota" not in found.facts["cores"]
    assert found.facts["memory limit GiB"] == "none"


def test_limits_of_a_container(no_gpu, eight_cores, tmp_path):
    root = linux(tmp_path, "0::/\n", **{"cpu.max": "250000 100000\n", "memory.max": f"{3 * 2**30}\n"})
    found = machine.devices({}, root=root, signs=())
    assert found.problems == ()
    assert found.facts["cores"].endswith(f"of {os.cpu_count()}, CPU quota of 2.5")
    assert found.facts["memory limit GiB"] == "3.0"


def test_a_gpu_that_tensorflow_does_not_find(no_gpu, monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})

    def problems(**environment):
        return machine.devices(environment, root=tmp_path, signs=(tmp_path / "nvidia0",)).problems

    (problem,) = problems()
    assert problem.startswith(f"{tmp_path / 'nvidia0'} exists, but this TensorFlow was built without CUDA")
    assert problems(CUDA_VISIBLE_DEVICES="1") == (problem,)
    assert problems(CUDA_VISIBLE_DEVICES="-1") == problems(CUDA_VISIBLE_DEVICES="") == (), "the user disabled it"


@pytest.mark.parametrize("capability, fact, num_problems", [((8, 6), "kernels for 8.0", 0), ((5, 2), "5.2", 1)])
def test_gpus_are_compared_with_what_tensorflow_was_built_for(
    eight_cores, monkeypatch, tmp_path, capability, fact, num_problems
):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    of_kind = tf.config.list_physical_devices
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [gpu] if kind == "GPU" else of_kind(kind))
    details = {"device_name": "NVIDIA X", "compute_capability": capability}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: details)
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"cuda_compute_capabilities": ["sm_80"]})
    found = machine.devices({}, root=tmp_path, signs=())
    assert found.facts["GPUs"][0].startswith("GPU:0 NVIDIA X, compute capability")
    assert found.facts["GPUs"][0].endswith(fact)
    assert len(found.problems) == num_problems


def test_the_cpu_is_named_with_what_makes_it_fast(tmp_path):
    info = tmp_path / "cpuinfo"
    core = "model name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx2 avx512f avx512_bf16x\n\n"
    info.write_text(core + core)
    assert machine.cpu_model(info) == "Some CPU @ 2 GHz (avx2, avx512f)"
    assert machine.cpu_model(tmp_path / "none").startswith("unknown (")


def test_threads(eight_cores):
    found = machine.threads({"OMP_NUM_THREADS": "3"}).facts
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["TF_NUM_INTRAOP_THREADS"] == "not set"
    assert found["default"] == (
        "on CPUs 8 towers, or fewer so that each gets 32 examples of a batch; on GPUs one tower per GPU"
    )
