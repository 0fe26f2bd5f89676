"""Which GPUs a worker's and a server's TensorFlow server starts."""

import tensorflow as tf
from tensorflow.python.eager import context

from strategies.distribute.helping_process import _session_config


def test_only_the_process_s_own_gpus_and_the_memory_that_it_needs(monkeypatch):
    """By default a server takes nearly all memory of all GPUs, also if its process has none of them."""
    running = context.context()
    gpus = [context.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]
    cpus = tf.config.list_physical_devices("CPU")
    monkeypatch.setattr(running, "_physical_devices", [*cpus, *gpus])
    monkeypatch.setattr(running, "_memory_growth_map", dict.fromkeys(gpus, True))
    # As on machines with GPUs, whose CPU is one device.
    monkeypatch.setattr(running, "_virtual_device_map", {})
    monkeypatch.setattr(running, "_visible_device_list", [*cpus, gpus[1]])
    options = _session_config(2).gpu_options
    assert (options.visible_device_list, options.allow_growth) == ("1", True)
    monkeypatch.setattr(running, "_visible_device_list", cpus)
    assert dict(_session_config(2).device_count) == {"CPU": 2, "GPU": 0}
