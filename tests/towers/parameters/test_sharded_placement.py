"""Sharded towers: what each device holds, sparse gradients, clipping, and checkpoints of slices."""

import numpy as np
import pytest
import tensorflow as tf

from strategies.registry import build_strategy
from strategies.training.checkpoints import Checkpoints
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.table_and_matrices import task, trained
from tests.towers.tiny_tasks import assert_close, parameters_of
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.parameters.sliced_variable import SlicedVariable
from towers.updates.clipping import Clipping
from towers.updates.rules import Adam, Momentum, Muon

CASES = [
    (Adam(weight_decay=0.1), Clipping(norm=0.05)),
    (Adam(weight_decay=0.1), Clipping(value=0.01)),
    (Momentum(momentum=0.9), Clipping(global_norm=0.1)),
]


@pytest.mark.full
@pytest.mark.parametrize("rule, clipping", CASES, ids=lambda given: type(given).__name__)
def test_it_equals_one_device_whatever_the_clipping(rule, clipping):
    found, expected = (trained(devices, rule, clipping=clipping) for devices in (cpus(3, sharded=True), cpus(1)))
    assert_close(parameters_of(found), parameters_of(expected))


def test_parameters_and_slots_are_on_their_owners_devices():
    strategy = trained(cpus(2, sharded=True), Adam(), steps=1)
    parts = strategy.engine.placement.parts
    assert {part.device for part in parts} == {"/device:CPU:0", "/device:CPU:1"}
    for part in parts:
        assert {variable.device[-13:] for variable in (part.variable, *part.slots.values())} == {part.device}
    held = [sum(part.num_bytes for part in parts if part.device == device) for device in cpus(2).towers]
    assert max(held) <= 1.1 * sum(held) / 2
    assert f"the fullest has {max(held):,}" in " ".join(strategy.notices)


@pytest.mark.full
def test_a_rule_that_needs_whole_matrices_gets_them():
    strategy = trained(cpus(2, sharded=True), Muon(momentum=0.9), steps=2)
    assert all(isinstance(variable, tf.Variable) for variable in strategy.engine.parameters().values())
    assert_close(parameters_of(strategy), parameters_of(trained(cpus(1), Muon(momentum=0.9), steps=2)))


@pytest.mark.parametrize("saver, reader", first_quick([(3, None), (3, 2), (None, 3)]))
def test_a_checkpoint_has_whole_parameters_for_any_number_of_owners(tmp_path, saver, reader):
    def started(num_owners):
        devices = cpus(num_owners, sharded=True) if num_owners else cpus(1)
        return trained(devices, Adam(), steps=1, clipping=Clipping(norm=0.05))

    first, second = started(saver), started(reader)
    first.run_steps(2)
    checkpoints = Checkpoints(tmp_path, first)
    checkpoints.prepare()
    path = checkpoints.save()
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    assert [40, 6] in [shape for name, shape in shapes.items() if name.startswith("parameters/")]
    assert Checkpoints(tmp_path, second).restore_latest() == 3
    for strategy in (first, second):
        strategy.restored()
        strategy.run_steps(2)
    assert_close(parameters_of(second), parameters_of(first))


def test_a_sliced_variable_is_assigned_and_read_as_a_whole():
    whole = np.arange(12.0, dtype=np.float32).reshape(2, 6)
    sliced = SlicedVariable([tf.Variable(tf.zeros([2, 2])), tf.Variable(tf.zeros([2, 4]))], 1)
    sliced.assign(whole)
    np.testing.assert_array_equal(sliced.parts[1].numpy(), whole[:, 2:])
    np.testing.assert_array_equal(tf.convert_to_tensor(sliced), whole)
    assert sliced.shape == (2, 6)


def test_other_modes_refuse_it_in_one_line():
    with refused("parameter_device='sharded' with strategy 'mirrored': only 'towers' can; use that"):
        build_strategy("mirrored", task(), cpus(2, sharded=True), StepOptions())
