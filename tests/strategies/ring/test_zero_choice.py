"""Which stages of ZeRO and parameter devices a ring has, and on which engine. These rings have one process."""

import dataclasses

import pytest

from strategies.engines import OWN, TENSORFLOW, EngineChoice
from strategies.registry import build_strategy, check_spread
from strategies.ring.exchange.joining import Ring, RingOptions
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import assert_close, parameters_of
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.updates.clipping import Clipping


def ring_of_one(zero: int, engine: str = "auto"):
    options = StepOptions(clipping=Clipping(norm=0.1))
    return build_strategy(
        "ring", small_task(), cpus(2, zero=zero), options, ring=Ring.alone(RingOptions(engine=engine))
    )


def test_zero_chooses_our_own_engine_and_says_why():
    strategy, plain = ring_of_one(zero=2), ring_of_one(zero=0)
    assert strategy.engine_choice == EngineChoice(OWN, "because MultiWorkerMirroredStrategy cannot serve zero=2")
    assert plain.engine_choice.name == TENSORFLOW
    for one in (strategy, plain):
        one.run_steps(2)
    assert_close(parameters_of(strategy), parameters_of(plain))


def test_tensorflows_engine_refuses_it_in_one_line():
    with refused("engine='tensorflow': MultiWorkerMirroredStrategy cannot serve zero=1; use engine='auto'"):
        ring_of_one(zero=1, engine="tensorflow")


def test_a_parameter_device_chooses_our_own_engine():
    devices = dataclasses.replace(cpus(2), parameters="/device:CPU:1")
    strategy = build_strategy("ring", small_task(), devices, StepOptions(), ring=Ring.alone())
    assert (
        strategy.engine_choice.reason == "because MultiWorkerMirroredStrategy cannot serve parameter_device=cpu:1"
    )
    assert {variable.device[-5:] for variable in strategy.engine.parameters().values()} == {"CPU:1"}
    replica = dataclasses.replace(devices, towers=("/device:CPU:1",))
    assert (
        build_strategy("ring", small_task(), replica, StepOptions(), ring=Ring.alone()).engine_choice.name
        == TENSORFLOW
    )


@pytest.mark.parametrize(
    "argument, instead",
    [
        ("parameter_device='sharded'", "use that, or omit parameter_device"),
        ("offload='optimizer'", "use that, or omit offload"),
    ],
)
def test_what_a_ring_has_not_is_refused(argument, instead):
    with refused(f"{argument} with strategy 'ring': only 'towers'", instead):
        check_spread("ring", argument)


@pytest.mark.full
@pytest.mark.parametrize("num_towers", [1, 2])
def test_a_ring_of_one_has_all_parameters(num_towers):
    devices, options = cpus(num_towers), StepOptions(clipping=Clipping(norm=0.1))
    found, plain = (
        build_strategy("ring", small_task(), dataclasses.replace(devices, zero=zero), options, ring=Ring.alone())
        for zero in (3, 0)
    )
    for one in (found, plain):
        one.run_steps(2)
    assert_close(parameters_of(found), parameters_of(plain))
