"""Flags of devices: how many examples this process computes, which limits its default number of towers."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags import devices

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}
RING = {"worker": ["b:1", "b:2", "b:3", "b:4"]}


@pytest.mark.parametrize(
    "cluster, settings, batch_size",
    [
        ({}, {}, 128),
        ({}, {"accumulation": 4}, 32),
        ({}, {"tower_shares": ["1", "2"]}, None),
        (RING, {"strategy": "ring"}, 32),
        (CLUSTER, {"strategy": "ps"}, 128),
        (CLUSTER, {"strategy": "ps", "staleness": "sync"}, 64),
    ],
)
def test_examples_of_this_process(monkeypatch, cluster, settings, batch_size):
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task} if cluster else {}))
    found = {}
    monkeypatch.setattr(devices, "configure_devices", lambda **named: found.update(named))
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        for name, value in settings.items():
            flags.FLAGS[name].value = value
        devices.devices_from_flags()
    assert found["batch_size"] == batch_size and found["num_towers"] is None
