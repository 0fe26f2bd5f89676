"""One check in a process of its own, whose GPU is split into two: devices can't be changed once TensorFlow runs.

    python -m tests.gpu.fresh_process placement tower_operations '"zero=2"'     a check, and its argument as JSON

With TOWERS_GPU_TESTS_ON=cpu two logical CPUs stand in for the GPUs: that shows that the checks themselves run.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys

STAND_IN = os.environ.get("TOWERS_GPU_TESTS_ON") == "cpu"
# Memory of each half of the GPU.
_HALF_MIB = 3072
_TIMEOUT_SECONDS = 240
# Checks without deterministic operations: a deterministic cross-entropy finds 0, not NaN, for a wrong label.
_AS_BY_DEFAULT = ("a_label_out_of_range_is_named", "several_steps")


def run_check(subject: str, check: str, argument: object = None) -> None:
    """Runs `check(argument)` of the module `tests.gpu.checks.SUBJECT` in a fresh process; it must return."""
    command = [sys.executable, "-m", "tests.gpu.fresh_process", subject, check, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    print(done.stdout)
    assert done.returncode == 0, f"{check}({argument}) failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def tower_devices() -> tuple[str, str]:
    """The two halves of the GPU, or the CPUs that stand in for them."""
    return ("/device:CPU:1", "/device:CPU:2") if STAND_IN else ("/device:GPU:0", "/device:GPU:1")


def towers(**fields):
    """`towers.devices.Devices` with a tower on each half, as `configure_devices` makes them for two GPUs."""
    from towers.devices import HOST, Devices

    devices = Devices(towers=tower_devices(), parameters=HOST, input_on_towers=True, deterministic=True)
    return dataclasses.replace(devices, **fields)


def _configure(*, deterministic: bool) -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    if not STAND_IN:
        gpu, *others = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([gpu], "GPU")
        half = tf.config.LogicalDeviceConfiguration(memory_limit=_HALF_MIB)
        tf.config.set_logical_device_configuration(gpu, [half, half])
        # Numbers are compared with the CPU's.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def main(subject: str, check: str, argument: str) -> None:
    # The check of memory growth configures its own devices.
    if subject != "memory_growth":
        _configure(deterministic=check not in _AS_BY_DEFAULT)
    module = importlib.import_module(f"tests.gpu.checks.{subject}")
    getattr(module, check)(*([] if argument == "null" else [json.loads(argument)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
