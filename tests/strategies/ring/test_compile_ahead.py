"""The first step of a ring's worker compiles its towers' kernels, unless they have graphs of their own."""

import dataclasses

import pytest

from tests.strategies.ring.threads import WorkersInThreads, rings
from tests.towers.layers.kernel_modes import network
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import TinyTask, images
from towers import engine, options
from towers.layers.convolutions import winograd
from towers.options import StepOptions


@pytest.mark.full
@pytest.mark.parametrize("zero, expected", [(0, [[4, 3], [4, 3]]), (3, [])])
def test_each_worker_compiles_for_the_parts_of_its_towers(monkeypatch, zero, expected):
    """A worker has 7 of 14 examples."""
    monkeypatch.setattr(options, "runs_onednn", lambda: True)
    monkeypatch.setattr(winograd, "_FEWEST_PIXELS", 1)
    started = []
    monkeypatch.setattr(engine, "compile_ahead", started.append)
    devices = dataclasses.replace(cpus(2, zero=zero), threads_per_tower=1, cpu_instructions=frozenset(["avx2"]))
    task = TinyTask(build=lambda: network(32), examples=images(14), batch_size=14)
    with rings(2) as (made, _):
        WorkersInThreads(made, task, StepOptions(), zero=zero, devices=devices).train(2)
    found = [[calls[0].shapes[0][0] for calls in of_worker.values()] for of_worker in started]
    assert found == expected
