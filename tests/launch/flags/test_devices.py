"""Flags of devices: the examples that this process computes, and the processes that share its cores."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags import devices
from launch.membership import shared_cores
from tests.towers.user_errors import refused
from towers.devices import Devices

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}
RING = {"worker": ["b:1", "b:2", "b:3", "b:4"]}


def configured(monkeypatch, settings: dict) -> dict:
    """The arguments of `configure_devices` with these flags."""
    found = {}
    own = Devices(towers=("/device:CPU:0",), parameters="/device:CPU:0")
    monkeypatch.setattr(devices, "configure_devices", lambda **named: found.update(named) or own)
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        for name, value in settings.items():
            flags.FLAGS[name].value = value
        devices.devices_from_flags()
    return found


@pytest.mark.parametrize(
    "settings, flag",
    [
        ({"strategy": "slices", "branch_devices": 3}, "--branch_devices"),
        ({"strategy": "ring", "grid": "slice:2", "branch_devices": 3}, "--branch_devices"),
        ({"strategy": "branches", "slices": 3}, "--slices"),
    ],
    ids=str,
)
def test_slices_refuse_the_flags_of_branches_and_the_reverse(monkeypatch, settings, flag):
    with refused(f"{flag} with --strategy={settings['strategy']}", f"omit {flag}"):
        configured(monkeypatch, settings)


AVX512 = ("avx2", "avx512f")


@pytest.mark.parametrize(
    "settings, instructions, cores",
    [
        ({}, AVX512, 1),
        ({"batch_stats": "synced"}, AVX512, 1),
        ({"batch_stats": "synced", "tuned_for_cpu": False}, AVX512, 2),
        ({"batch_stats": "synced", "fused_batch_norm": False}, AVX512, 2),
        ({"batch_stats": "synced"}, (), 2),
        ({"batch_stats": "synced"}, ("avx2",), 1),
        ({"batch_stats": "synced", "parameter_device": "sharded"}, (), 1),
    ],
)
def test_synced_towers_have_two_cores_where_batch_norms_are_not_compiled(
    monkeypatch, settings, instructions, cores
):
    monkeypatch.setattr(devices, "cpu_instructions", lambda limit: frozenset(instructions))
    assert configured(monkeypatch, settings)["cores_per_tower"] == cores


@pytest.mark.parametrize(
    "cluster, settings, batch_size, num_processes",
    [
        ({}, {}, 128, 1),
        ({}, {"accumulation": 4}, 32, 1),
        ({}, {"tower_shares": ["1", "2"]}, None, 1),
        (RING, {"strategy": "ring"}, 32, 4),
        (RING, {}, 128, 1),
        (CLUSTER, {"strategy": "ps"}, 128, 2),
        (CLUSTER, {"strategy": "ps", "staleness": "sync"}, 64, 2),
    ],
)
def test_examples_and_neighbours_of_this_process(monkeypatch, cluster, settings, batch_size, num_processes):
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task} if cluster else {}))
    monkeypatch.delenv(shared_cores.VARIABLE, raising=False)
    monkeypatch.setattr(shared_cores, "may_use_all_cores", lambda: True)
    found = configured(monkeypatch, settings)
    assert found["batch_size"] == batch_size and found["num_towers"] is None
    assert found["num_processes"] == num_processes
