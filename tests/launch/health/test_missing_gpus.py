"""The reason why TensorFlow finds no GPU is quoted from its log.

The first two logs are of TensorFlow 2.21 without GPUs; the third is written by hand, from TensorFlow's source.
"""

import os
import pathlib

import pytest
import tensorflow as tf

from launch.health.missing_gpus import DRIVER_SIGNS, missing_gpus, reason_in

IMPORT = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795413399.214390   12358 port.cc:153] oneDNN custom operations are on.
I0000 00:00:1795413399.214407   12358 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will \
not be used.
I0000 00:00:1795413399.342477   12358 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use.
"""
NO_DEVICE = """\
E0000 00:00:1795413405.680164   12358 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed \
call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected
"""
NO_LIBRARIES = """\
2026-11-23 05:59:01.123456: W tensorflow/core/common_runtime/gpu/gpu_device.cc:2343] Cannot dlopen some GPU \
libraries. Please make sure the missing libraries mentioned above are installed properly.
Skipping registering GPU devices...
"""


@pytest.mark.parametrize(
    "messages, reason",
    [
        pytest.param(IMPORT, "Could not find cuda drivers on your machine, GPU will not be used", id="at_import"),
        pytest.param(
            IMPORT + NO_DEVICE,
            "failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: CUDA_ERROR_NO_DEVICE: no "
            "CUDA-capable device is detected",
            id="driver",
        ),
        pytest.param(
            IMPORT + NO_LIBRARIES,
            "Cannot dlopen some GPU libraries. Please make sure the missing libraries mentioned above are "
            "installed properly",
            id="libraries",
        ),
        pytest.param("something else\n", "it gives no reason", id="none"),
    ],
)
def test_the_reason_without_time_and_place(messages, reason):
    assert reason_in(messages) == reason


@pytest.fixture
def signs(tmp_path):
    (tmp_path / "version").write_text("NVRM version: 550")
    return (tmp_path / "none", tmp_path / "version")


def test_nothing_is_missing(signs, tmp_path):
    assert missing_gpus(1, {}, signs=signs) == ""
    assert missing_gpus(0, {}, signs=signs[:1]) == "", "there is no driver"
    for hidden in ("", "-1", "-1,0", "NoDevFiles", "none", "void"):
        assert missing_gpus(0, {"CUDA_VISIBLE_DEVICES": hidden}, signs=signs) == "", "the user disabled them"
    assert missing_gpus(0, {"NVIDIA_VISIBLE_DEVICES": "void"}, signs=signs) == "", "the container has none"


@pytest.mark.parametrize("value", ["all", "cuda:0", "[0]"])
def test_a_variable_that_hides_all_gpus_by_mistake(value, signs):
    line = missing_gpus(0, {"CUDA_VISIBLE_DEVICES": value}, signs=signs)
    assert line.startswith(f"CUDA_VISIBLE_DEVICES={value}: ") and "unset it to use all" in line
    assert missing_gpus(1, {"CUDA_VISIBLE_DEVICES": value}, signs=signs) == ""


def test_the_driver_of_windows_shows_itself_in_wsl2(signs, monkeypatch):
    """There the kernel's module and its device files, by which other systems are recognised, do not exist."""
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})
    (of_wsl,) = (path for path in DRIVER_SIGNS if "wsl" in path.parts)
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: path == of_wsl)
    assert missing_gpus(0, {}).startswith(f"{of_wsl} exists, but this TensorFlow was built without CUDA")


def test_a_tensorflow_without_cuda(signs, monkeypatch):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})
    assert "was built without CUDA: run pip install 'tensorflow[and-cuda]'" in missing_gpus(0, {}, signs=signs)


@pytest.mark.full
@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")) or not tf.sysconfig.get_build_info().get("is_cuda_build"),
    reason="needs TensorFlow built for CUDA, and no GPU",
)
def test_tensorflow_itself_says_why(signs):
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    line = missing_gpus(0, environ, signs=signs)
    assert line.startswith(f"{signs[1]} exists, but TensorFlow finds no GPU (") and "\n" not in line
    assert "cuInit" in line and "check nvidia-smi" in line
