"""A process takes the GPU memory that it needs, and not the rest."""

import os
import subprocess

_ALLOWED_MIB = 4096


def a_process_leaves_the_rest_of_the_gpu() -> None:
    """After a first operation on our devices this process has less than 4 GiB of the GPU."""
    # Before CUDA starts: it counts GPUs as nvidia-smi does, not the fastest first.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    before = _used_mib()
    from towers.device_setup import configure_devices

    devices = configure_devices(kind="gpu", num_towers=1)
    import tensorflow as tf

    assert all(tf.config.experimental.get_memory_growth(gpu) for gpu in tf.config.get_visible_devices("GPU"))
    with tf.device(devices.towers[0]):
        assert float(tf.reduce_sum(tf.matmul(tf.ones([64, 64]), tf.ones([64, 64])))) == 64.0**3
    after = _used_mib()
    # In a container the driver may not know the process by this id.
    used = after.get(str(os.getpid())) or after["all"] - before["all"]
    print(f"the process uses {used} MiB")
    assert 0 < used < _ALLOWED_MIB


def _used_mib() -> dict[str, int]:
    """MiB in use, as the driver counts them: by process, and in all on the first visible GPU."""
    first, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    processes = _asked("--query-compute-apps=pid,used_memory")
    (memory,) = _asked("--query-gpu=memory.used", f"--id={first}")
    return {pid: int(mib) for pid, mib in processes if mib.isdecimal()} | {"all": int(memory[0])}


def _asked(*query: str) -> list[list[str]]:
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [line.split(", ") for line in said.splitlines()]
