"""A worker or server of TensorFlow's engine: which GPUs its server starts, and a chief that ends at the start."""

import socket

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from launch.membership.free_ports import free_addresses
from strategies.cluster import Cluster
from strategies.distribute import helping_process
from strategies.distribute.helping_process import HelpingProcess, _session_config
from tests.strategies.servers.at_once import LIMIT_SECONDS, Started


def test_only_the_process_s_own_gpus_and_the_memory_that_it_needs(monkeypatch):
    """By default a server takes nearly all memory of all GPUs, even if none of them is its process's."""
    running = context.context()
    gpus = [context.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]
    cpus = tf.config.list_physical_devices("CPU")
    monkeypatch.setattr(running, "_physical_devices", [*cpus, *gpus])
    monkeypatch.setattr(running, "_memory_growth_map", dict.fromkeys(gpus, True))
    # As on machines with GPUs, where the CPU is one device.
    monkeypatch.setattr(running, "_virtual_device_map", {})
    monkeypatch.setattr(running, "_visible_device_list", [*cpus, gpus[1]])
    options = _session_config(2).gpu_options
    assert (options.visible_device_list, options.allow_growth) == ("1", True)
    monkeypatch.setattr(running, "_visible_device_list", cpus)
    assert dict(_session_config(2).device_count) == {"CPU": 2, "GPU": 0}


@pytest.mark.timeout(60)
def test_a_stop_signal_ends_a_server_whose_chief_has_ended_before_its_first_call(monkeypatch):
    """Otherwise it would wait for as long as at the start, and the launcher would kill it after two minutes."""
    monkeypatch.setattr(helping_process, "wait_for_all", lambda *_, **__: None)
    monkeypatch.setattr(tf.distribute, "Server", lambda *_, **__: None)
    monkeypatch.setattr(helping_process, "_PROBE_SECONDS", 0.01)
    addresses = {role: tuple(free_addresses(1)) for role in ("chief", "worker", "ps")}
    cluster = Cluster(addresses=addresses, role="ps", index=0)
    server = HelpingProcess(cluster, num_cpus=1, startup_timeout_seconds=10 * LIMIT_SECONDS)
    port = int(addresses["chief"][0].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as chief:
        started = Started(lambda: server.run({}, dict, timeout_seconds=LIMIT_SECONDS, stop_asked=lambda: True))
        for _ in range(4):
            chief.accept()[0].close()
        assert started.is_running
    assert started.result() == "interrupted"
