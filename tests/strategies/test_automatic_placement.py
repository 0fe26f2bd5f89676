"""With parameter_device=auto, parameters are where they are best for the model. Logical CPUs stand in for GPUs."""

import dataclasses
import functools

import pytest

from strategies.registry import build_strategy
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import assert_close, parameters_of
from towers.devices import Devices
from towers.hardware.gpus import Gpu
from towers.options import StepOptions
from towers.updates.rules import SGD, Adam


def gpus(count: int, memory_bytes: int | None = 16 << 30) -> Devices:
    """Towers on logical CPUs that count as GPUs, with parameter_device=auto."""
    found = tuple(Gpu(index=index, memory_bytes=memory_bytes) for index in range(count))
    return dataclasses.replace(cpus(count, parameters=count), gpus=found, automatic=True)


def trained(devices: Devices, **options):
    strategy = build_strategy("towers", small_task(), devices, StepOptions(rule=SGD(), **options))
    strategy.run_steps(4)
    return strategy


@functools.cache
def on_cpus(count: int) -> dict:
    """The parameters of towers on CPUs that are only CPUs."""
    return parameters_of(trained(cpus(count)))


@pytest.mark.parametrize(
    "count, memory_bytes, choice, said",
    [
        pytest.param(1, 16 << 30, "cpu:0", "parameters on cpu:0: the only GPU of this process", id="one"),
        pytest.param(2, 16 << 30, "replicated", "parameters copied to each GPU: each of 2 GPUs", id="several"),
        pytest.param(2, 4096, "cpu:0", "parameters on cpu:0: 0.00686 MiB of", id="too_small"),
    ],
)
def test_parameters_are_where_they_are_best(count, memory_bytes, choice, said):
    strategy = trained(gpus(count, memory_bytes))
    assert strategy.devices.choice == choice
    assert not strategy.devices.automatic
    assert any(notice.startswith(said) for notice in strategy.notices), strategy.notices
    assert strategy.devices.replicated == (choice == "replicated")
    assert_close(parameters_of(strategy), on_cpus(count))


def test_optimizer_state_counts():
    def choice(rule):
        devices = gpus(2, memory_bytes=20_000)
        return build_strategy("towers", small_task(), devices, StepOptions(rule=rule)).devices.choice

    assert (choice(SGD()), choice(Adam())) == ("replicated", "cpu:0")


@pytest.mark.parametrize("name", ["mirrored", "ring"])
def test_no_other_strategy_chooses(name):
    strategy = build_strategy(name, small_task(), gpus(2), StepOptions())
    assert not strategy.devices.reason and not strategy.devices.replicated
    assert strategy.devices.parameters == "/device:CPU:2"
