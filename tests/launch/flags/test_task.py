"""Flags of the task: messages of data sets name flags that exist."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags import devices, task
from models.data.tfds_images import NotReadableByRecord
from tests.towers.user_errors import refused


@pytest.mark.parametrize("decoded_gib, flag", [(2.31, "--cache_gib=2.4"), (0.04, "--cache_gib=0.1")])
def test_a_set_that_cannot_be_read_names_the_flag_for_memory(monkeypatch, decoded_gib, flag):
    def build_task(*unused, cache_bytes, **also_unused):
        size = int(decoded_gib * 2**30)
        raise NotReadableByRecord(f"set takes {size} bytes", decoded_bytes=size, cache_bytes=cache_bytes)

    monkeypatch.setattr(task, "build_task", build_task)
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        flags.FLAGS.cache_gib = 0.03
        with refused("set takes", "more than --cache_gib=0.03", f"use {flag}"):
            task.task_from_flags()


def test_a_limit_of_memory_beyond_all_machines_is_none(monkeypatch):
    monkeypatch.setattr(task, "build_task", lambda *_, cache_bytes, **__: cache_bytes)
    with flagsaver.flagsaver(cache_gib=1e308):
        flags.FLAGS.mark_as_parsed()
        assert task.task_from_flags() >= 2**60


@pytest.mark.parametrize(
    "settings, threads",
    [({}, 16), ({"num_towers": 2}, 4), ({"tower_device": "cpu"}, 3), ({"input_threads": 5}, 5)],
    ids=str,
)
def test_threads_that_prepare_batches_on_a_machine_of_eight_gpus(monkeypatch, settings, threads):
    """One process gets as many as eight processes with a GPU each."""
    monkeypatch.setattr(devices, "physical_gpus", lambda: [f"GPU:{index}" for index in range(8)])
    monkeypatch.setattr(devices, "num_cores", lambda: 48)
    monkeypatch.setattr(task, "build_task", lambda *_, num_input_threads, **__: num_input_threads)
    with flagsaver.flagsaver(**settings):
        flags.FLAGS.mark_as_parsed()
        assert task.task_from_flags() == threads
