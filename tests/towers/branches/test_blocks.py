"""Blocks with independent branches in graphs of Keras."""

import keras
import pytest
from keras import layers

from models.networks.dlrm import dlrm
from models.networks.inception import inception
from models.networks.resnet import resnet
from tests.towers.branches.branched_networks import branches_by_block, small_inception
from towers.branches.blocks import blocks_of
from towers.recompute.chain import functional_form


def dense(name: str) -> layers.Dense:
    return layers.Dense(4, name=name)


def joined(*parts, name: str = "join") -> keras.KerasTensor:
    return layers.Concatenate(name=name)(list(parts))


def test_the_blocks_of_an_inception():
    """Skip connections are no branches; a pool belongs to the branch behind it."""
    found = branches_by_block(blocks_of(small_inception()))
    assert [join for join, _ in found] == ["a_join", "b_join"]
    assert sorted(found[0][1], key=len) == [
        ["a_direct", "a_direct_norm", "a_direct_relu"],
        ["a_pool", "a_pooled", "a_pooled_norm", "a_pooled_relu", "a_dropped"],
        ["a_reduce", "a_reduce_norm", "a_reduce_relu", "a_conv", "a_conv_norm", "a_conv_relu"],
    ]


@pytest.mark.full
def test_the_blocks_of_the_network_inception():
    assert [block.num_moving for block in blocks_of(inception())] == [4] * 9


def test_residual_networks_have_branches_only_where_the_shortcut_has_a_kernel():
    assert [block.num_moving for block in blocks_of(resnet(20))] == [2, 2]


def test_a_branch_inside_a_branch():
    inputs = layers.Input((4,))
    x = dense("one")(inputs)
    inner = joined(dense("left")(x), dense("right")(x), name="inner")
    model = keras.Model(inputs, joined(inner, dense("other")(inputs)))
    (block,) = blocks_of(model)
    assert branches_by_block([block]) == [("join", [["one", "left", "right", "inner"], ["other"]])]
    (branch,) = [branch for branch in block.branches if branch.blocks]
    assert branches_by_block(branch.blocks) == [("inner", [["left"], ["right"]])]
    assert branch.name == "one"


def test_branches_that_share_a_layer_are_one():
    x = layers.Input((4,))
    shared = dense("shared")
    parts = [dense("a")(shared(x)), dense("b")(shared(x)), dense("c")(x)]
    (block,) = blocks_of(keras.Model(x, joined(*parts)))
    assert sorted(map(len, (names for _, found in branches_by_block([block]) for names in found))) == [1, 4]


def test_a_branch_that_shares_a_layer_with_the_rest_stays():
    inputs = layers.Input((4,))
    shared = dense("shared")
    x = shared(inputs)
    model = keras.Model(inputs, joined(dense("a")(x), dense("b")(x), shared(x)))
    (block,) = blocks_of(model)
    assert branches_by_block([block]) == [("join", [["a"], ["b"]])]
    assert [branch.name for branch in block.branches if not branch.moves] == ["shared"]


def test_tables_whose_rows_meet_before_the_last_join():
    """The dense numbers go to two joins, so they are in no block."""
    model = dlrm(table_rows=[5, 6, 7], num_dense=2, width=3)
    (block,) = blocks_of(model)
    assert [branch.name for branch in block.branches] == ["table_0", "table_1", "table_2"]


def test_heads_and_inputs_are_branches_too():
    first, second = layers.Input((4,), name="first"), layers.Input((4,), name="second")
    x = joined(dense("of_first")(first), dense("of_second")(second))
    model = keras.Model([first, second], [dense("head")(x), dense("other_head")(dense("hidden")(x))])
    found = branches_by_block(blocks_of(model))
    assert [(join, sorted(parts)) for join, parts in found] == [
        ("join", [["of_first"], ["of_second"]]),
        ("the outputs", [["head"], ["hidden", "other_head"]]),
    ]


def chain() -> keras.Model:
    return keras.Sequential([layers.Input((4,)), dense("a"), dense("b")])


def skipping() -> keras.Model:
    x = layers.Input((4,))
    return keras.Model(x, layers.Add()([layers.ReLU()(x), dense("b")(dense("a")(x))]))


@pytest.mark.parametrize("build_model", [chain, skipping])
def test_models_without_branches(build_model):
    assert blocks_of(functional_form(build_model())) == []
