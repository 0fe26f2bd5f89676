"""Which device computes which branch: arithmetic, and plans of models."""

import keras
import pytest
from keras import layers

from tests.towers.branches.branched_networks import small_inception
from tests.towers.user_errors import refused
from towers.branches import plan as plan_module
from towers.branches.assignment import assigned
from towers.branches.blocks import Block, Branch
from towers.branches.options import BranchOptions
from towers.branches.plan import plan_of
from towers.stages.model_stages import nodes_of


def block(*costs: float, stays: int = 0) -> Block:
    """A block whose branches have these costs (as their nodes); the last `stays` branches don't move."""
    count = len(costs)
    return Block("join", tuple(Branch((cost,), index < count - stays) for index, cost in enumerate(costs)))


def cost_of(branch: Branch) -> float:
    return sum(branch.nodes) + sum(cost_of(one) for inner in branch.blocks for one in inner.branches)


def devices(blocks, num_devices: int) -> list[tuple[int, ...]]:
    return [one.devices for one in assigned(blocks, cost_of, num_devices)]


@pytest.mark.parametrize(
    "blocks, num_devices, expected",
    [
        ([block(3, 5, 4, 2)], 2, [(1, 0, 1, 0)]),
        ([block(3, 5, 4, 2)], 3, [(2, 0, 1, 2)]),
        # The first device computes the branches that stay.
        ([block(3, 5, 4, stays=1)], 2, [(0, 1, 0)]),
        # Of devices with equal work, the one with less assigned before gets the branch.
        ([block(5, 1), block(5, 1)], 2, [(0, 1), (1, 0)]),
    ],
    ids=str,
)
def test_the_longest_branch_goes_first(blocks, num_devices, expected):
    assert devices(blocks, num_devices) == expected


@pytest.mark.parametrize("inner, other, expected", [((6, 6), 1, "inner"), ((6, 6), 12, "outer")], ids=str)
def test_a_block_or_the_blocks_inside_it(inner, other, expected):
    """In the second case, dividing the outer block takes max(13, 12), the inner one 1 + 6 + 12."""
    inside = Block("inner", block(*inner).branches)
    outer = Block("outer", (Branch((1,), True, (inside,)), Branch((other,), True)))
    (found,) = assigned([outer], cost_of, 2)
    assert found.block.join == expected


def names_on(plan, device: int) -> set[str]:
    return {
        branch.name
        for one in plan.blocks
        for branch, home in zip(one.block.branches, one.devices, strict=True)
        if home == device and branch.moves
    }


def test_a_plan_by_parameters():
    """The plan is the same whenever it is made, so that a resumed run adds in the same order."""
    model = small_inception()
    plan = plan_of(model, 3, BranchOptions())
    assert [names_on(plan, device) for device in range(3)] == [
        {"a_reduce", "b_pooled"},
        {"a_direct", "b_direct"},
        {"a_pooled", "b_reduce"},
    ]
    found = dict(zip((v.path for v in model.variables), plan.devices_of(model.variables), strict=True))
    expected = {"a_conv/kernel": 0, "a_direct/kernel": 1, "b_conv_norm/moving_mean": 2, "logits/kernel": 0}
    assert {name: found[name] for name in expected} == expected


def test_a_plan_by_time_gives_each_device_a_branch():
    plan = plan_of(small_inception(), 3, BranchOptions(balance="time"), num_examples=2)
    assert plan.is_measured
    assert all(sorted(set(one.devices)) == [0, 1, 2] for one in plan.blocks)


def test_a_plan_by_time_goes_by_the_measurement(monkeypatch):
    """In the first block, the branch with the fewest parameters takes longest."""
    long = {"a_pool": 5.0, "a_direct": 3.0, "b_direct": 9.0}

    def seconds(functional, num_examples, kernels):
        return [long.get(node.operation.name, 0.1) for node in nodes_of(functional)]

    monkeypatch.setattr(plan_module, "operation_seconds", seconds)
    plan = plan_of(small_inception(), 2, BranchOptions(balance="time"), num_examples=2)
    assert names_on(plan, 0) == {"a_pooled", "b_reduce", "b_pooled"}
    assert names_on(plan, 1) == {"a_direct", "a_reduce", "b_direct"}


def test_blocks_of_a_model_inside_the_model():
    inputs = layers.Input((6, 6, 3))
    model = keras.Model(inputs, layers.Dense(2)(small_inception()(layers.Rescaling(0.5)(inputs))))
    plan = plan_of(model, 2, BranchOptions())
    assert len(plan.blocks) == 2
    assert 1 in plan.devices_of(model.trainable_variables)


class Subclassed(keras.Model):
    """A model with a call of its own."""

    def __init__(self):
        super().__init__(name="own")
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)


def chain() -> keras.Model:
    return keras.Sequential([layers.Input((4,)), layers.Dense(2), layers.Dense(2)], name="chain")


@pytest.mark.parametrize(
    "build, num_devices, parts",
    [
        (chain, 2, ("model 'chain' has no branches", "two or more chains of layers", "strategy='towers'")),
        (Subclassed, 2, ("'own' of class Subclassed can't be divided into branches", "its own call()")),
        (small_inception, 4, ("4 devices a tower", "has 3 branches with parameters", "use 3 devices")),
    ],
)
def test_models_that_it_refuses(build, num_devices, parts):
    with refused(*parts):
        plan_of(build(), num_devices, BranchOptions())
