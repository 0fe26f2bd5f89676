"""A process takes the GPU memory that it needs, and not the rest."""

import subprocess

_ALLOWED_MIB = 4096


def a_process_leaves_the_rest_of_the_gpu() -> None:
    """After a first operation on our devices, the GPU's used memory has grown by less than 4 GiB."""
    before = _used_mib()
    from towers.device_setup import configure_devices

    devices = configure_devices(kind="gpu", num_towers=1)
    import tensorflow as tf

    assert all(tf.config.experimental.get_memory_growth(gpu) for gpu in tf.config.list_physical_devices("GPU"))
    with tf.device(devices.towers[0]):
        assert float(tf.reduce_sum(tf.matmul(tf.ones([64, 64]), tf.ones([64, 64])))) == 64.0**3
    used = _used_mib() - before
    print(f"the process uses {used} MiB")
    assert used < _ALLOWED_MIB


def _used_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0])
