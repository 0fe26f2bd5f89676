"""Copies of the parameters on each tower's device: equal copies, where slots are, clipping, and checkpoints."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from strategies.run_settings import changes, plain_settings
from strategies.towers import towers_strategy
from strategies.training.checkpoints import Checkpoints
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.table_and_matrices import task, trained
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, parameters_of, stacked, vectors
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.parameters.copied_placement import CopiedPlacement
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import Lookahead
from towers.updates.rules import Adam, Momentum, Muon
from towers.updates.schedules import Constant

REPLICATED, ZERO_1, ZERO_2, ZERO_3 = {"replicated": True}, {"zero": 1}, {"zero": 2}, {"zero": 3}
CENTRAL: dict = {}


def assert_copies_are_equal(strategy) -> None:
    for part in strategy.engine.placement.parts:
        for copies in (part.copies, *_by_slot(part.slots)):
            first, *others = [variable.numpy().tobytes() for variable in copies.values()]
            assert all(other == first for other in others), part.shard.name


def _by_slot(slots):
    names = next(iter(slots.values()))
    return [{device: own[name] for device, own in slots.items()} for name in names]


RULES = {
    "adamw": Adam(weight_decay=0.1),
    "muon": Muon(momentum=0.9),
    "lookahead": Lookahead(rule=Momentum(momentum=0.9), num_updates=5, every=2),
}


CASES = [
    (ZERO_1, "adamw", Clipping(global_norm=0.1)),
    (REPLICATED, "muon", Clipping(global_norm=0.1)),
    (ZERO_2, "lookahead", Clipping(norm=0.05)),
]


@pytest.mark.full
@pytest.mark.parametrize("spread, rule, clipping", CASES, ids=str)
def test_it_equals_one_device_and_its_copies_are_equal_to_the_bit(spread, rule, clipping):
    found, expected = (
        trained(devices, RULES[rule], clipping=clipping) for devices in (cpus(3, **spread), cpus(1))
    )
    assert_close(parameters_of(found), parameters_of(expected))
    assert_copies_are_equal(found)


@pytest.mark.parametrize("spread, share", first_quick([(ZERO_1, 0.5), (REPLICATED, 1.0)]), ids=str)
def test_slots_are_on_every_device_or_in_equal_parts_on_their_owners(spread, share):
    strategy = trained(cpus(2, **spread), Adam(), steps=1)
    parts = strategy.engine.placement.parts
    slots = [variable for part in parts for own in part.slots.values() for variable in own.values()]
    held = {device: sum(_bytes(one) for one in slots if one.device.endswith(device)) for device in cpus(2).towers}
    total = 2 * sum(_bytes(part.copies[part.device]) for part in parts)
    assert max(held.values()) <= 1.1 * share * total
    for part in parts:
        assert {variable.device[-13:] for variable in part.copies.values()} == set(cpus(2).towers)
    first, second = held.values()
    assert f"optimizer state: {first:,} bytes on cpu:0, {second:,} on cpu:1" in " ".join(strategy.notices)


@pytest.mark.parametrize("spread", first_quick([REPLICATED, ZERO_2]), ids=str)
def test_state_is_on_every_device_and_no_variable_is_sent_to_towers(spread):
    def build():
        frozen = layers.Dense(6, "tanh", trainable=False, name="frozen")
        return stacked((4,), frozen, layers.BatchNormalization(), layers.Dense(NUM_CLASSES))

    task = TinyTask(build=build, examples=vectors(11))
    found, expected = (
        towers_strategy(task, devices, StepOptions(schedule=Constant(0.1), batch_stats="synced"))
        for devices in (cpus(3, **spread), cpus(1))
    )
    expected.run_steps(2)
    with recorded_graphs() as graphs:
        found.run_steps(2)
    state = found.engine.state()
    for name, variable in state.items():
        assert {copy.device[-13:] for copy in variable.copies} == set(cpus(3).towers)
        np.testing.assert_allclose(variable.numpy(), expected.engine.state()[name].numpy(), rtol=1e-5, atol=1e-6)
        assert len({copy.numpy().tobytes() for copy in variable.copies}) == 1
    if spread == REPLICATED:  # with ZeRO the owners' new parameters are read and sent
        # The one value sent to each device is the loss scale.
        assert [graphs.copies("CPU:0", target).total() for target in ("CPU:1", "CPU:2")] == [1, 1]


@pytest.mark.parametrize(
    "spread, argument",
    first_quick(
        [
            (ZERO_1, "zero=1"),
            ({"sharded": True}, "parameter_device='sharded'"),
            (REPLICATED, "parameter_device='replicated'"),
        ],
        2,
    ),
    ids=str,
)
def test_one_tower_says_that_nothing_is_divided(spread, argument):
    alone, two = (
        build_strategy("towers", task(), cpus(count, **spread), StepOptions()).notices for count in (1, 2)
    )
    assert f"{argument} with 1 tower: it has everything, and nothing is divided or copied" in alone[0]
    assert "1 tower:" not in " ".join(two) and "2 devices" in two[0]


def test_a_resumed_run_can_say_that_parameters_were_elsewhere():
    given = [{}, {"sharded": True}, ZERO_1]
    central, sharded, zero = (
        plain_settings(build_strategy("towers", task(), cpus(2, **one), StepOptions()).settings) for one in given
    )
    assert changes(central, sharded) == ["parameter_device was cpu:0, is sharded"]
    assert changes(central, zero) == ["zero was 0, is 1"]


@pytest.mark.parametrize("zero", [1, 2])
def test_what_is_kept_between_microbatches(zero):
    """ZeRO-1 keeps every tower's gradients and sums them once a step; ZeRO-2 keeps the sum of each part."""
    strategy = trained(cpus(2, zero=zero), Adam(), steps=0, accumulation=2)
    kept = strategy.engine.first_function(strategy._next_batch(0)).gradients
    num_parts, num_parameters = len(strategy.engine.placement.parts), len(strategy.engine.parameters())
    assert num_parts == num_parameters + 1, "one is sliced"
    assert len(kept) == (2 * num_parameters if zero == 1 else num_parts)


@pytest.mark.full
def test_offloaded_slots_are_on_the_parameter_device_alone():
    strategy = trained(cpus(2, parameters=3, offload="optimizer"), Adam(weight_decay=0.1))
    placement = strategy.engine.placement
    assert {variable.device[-13:] for by_name in placement.slots.values() for variable in by_name.values()} == {
        "/device:CPU:3"
    }
    assert {device for part in placement.parts for device in part.copies} == {*cpus(2).towers, "/device:CPU:3"}
    assert_close(parameters_of(strategy), parameters_of(trained(cpus(1), Adam(weight_decay=0.1))))
    assert_copies_are_equal(strategy)


def _bytes(variable) -> int:
    return variable.dtype.size * variable.shape.num_elements()


@pytest.mark.full
def test_each_mode_resumes_from_the_checkpoint_of_another(tmp_path):
    """Two steps in each mode, compared with as many steps on one device."""
    chain = [ZERO_1, REPLICATED, CENTRAL, ZERO_3, {"sharded": True}, ZERO_2]
    for leg, spread in enumerate(chain):
        strategy = trained(cpus(3, **spread), Adam(), steps=0)
        checkpoints = Checkpoints(tmp_path, strategy)
        if leg:
            assert checkpoints.restore_latest() == 2 * leg
            strategy.restored()
        else:
            checkpoints.prepare()
        strategy.run_steps(2)
        if isinstance(strategy.engine.placement, CopiedPlacement):
            assert_copies_are_equal(strategy)
        path = checkpoints.save()
    assert_close(parameters_of(strategy), parameters_of(trained(cpus(1), Adam(), steps=2 * len(chain))))
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    assert sum(shape == [40, 6] for shape in shapes.values()) == 3, "the table and its two slots, once"


@pytest.mark.parametrize(
    "spread, value", [(REPLICATED, "parameter_device='replicated'"), (ZERO_2, "zero=2")], ids=str
)
def test_other_modes_refuse_it_in_one_line(spread, value):
    with refused(f"{value} with strategy 'mirrored': only 'towers'"):
        build_strategy("mirrored", task(), cpus(2, **spread), StepOptions())
