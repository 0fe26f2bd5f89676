"""A link ends exactly where every path through the model passes."""

import random

import keras
import pytest
from keras import layers

from tests.tiers import first_quick
from towers.recompute.chain import finest, links_of


def random_model(draw: random.Random, num_layers: int = 12) -> keras.Model:
    """Each layer reads one or two tensors before it; what nothing reads is summed at the end."""
    inputs = layers.Input((3,))
    tensors = [layers.Dense(3, name="first")(inputs)]
    read = set()
    for index in range(num_layers):
        chosen = draw.sample(
            range(max(0, len(tensors) - 3), len(tensors)), min(len(tensors), draw.choice((1, 1, 2)))
        )
        read.update(chosen)
        given = [tensors[one] for one in chosen]
        layer = layers.Add(name=f"add{index}") if len(given) > 1 else layers.Dense(3, name=f"dense{index}")
        tensors.append(layer(given if len(given) > 1 else given[0]))
    left = [tensor for index, tensor in enumerate(tensors) if index not in read]
    outputs = layers.Add(name="rest")(left) if len(left) > 1 else left[0]
    return keras.Model(inputs, outputs)


def reads(tensor, without) -> bool:
    """Whether the tensor depends on a model input by a path without the layer `without`."""
    operation = tensor._keras_history.operation
    if operation is without:
        return False
    node = operation._inbound_nodes[tensor._keras_history.node_index]
    return node.is_input or any(reads(before, without) for before in node.input_tensors)


@pytest.mark.parametrize("seed", first_quick(range(12), 3))
def test_a_link_ends_where_every_path_passes(seed):
    model = random_model(random.Random(seed))
    ends = [link[-1].operation for link in links_of(model)]
    expected = {
        layer.name
        for layer in model.layers
        if not isinstance(layer, layers.InputLayer) and not reads(model.outputs[0], layer)
    }
    assert {operation.name for operation in ends} == expected
    assert sum(len(link) for link in links_of(model)) == len(model.layers) - 1


def test_a_second_input_enters_a_chain_anywhere():
    image, tag = layers.Input((4,), name="image"), layers.Input((2,), name="tag")
    hidden = layers.Dense(3, name="hidden")(image)
    outputs = layers.Dense(1, name="logits")(layers.Concatenate(name="both")([hidden, tag]))
    links = links_of(keras.Model([image, tag], outputs))
    assert [[call.operation.name for call in link] for link in links] == [["hidden"], ["both"], ["logits"]]


def test_an_inner_model_is_opened_with_its_input_as_a_tensor_that_is_kept():
    """The residual connection goes around the inner layers, so they are one link."""

    def block(name):
        inputs = layers.Input((3,))
        outputs = layers.Add(name=f"{name}_sum")([inputs, layers.Dense(3, name=f"{name}_dense")(inputs)])
        return keras.Model(inputs, layers.ReLU(name=f"{name}_relu")(outputs), name=name)

    inputs = layers.Input((3,))
    links = links_of(keras.Model(inputs, block("b")(block("a")(inputs))))
    assert [[call.operation.name for call in link] for link in links] == [["a"], ["b"]]
    names = [[call.operation.name for call in link] for link in finest(links)]
    assert names == [["a_dense", "a_sum"], ["a_relu"], ["b_dense", "b_sum"], ["b_relu"]]


def test_calls_of_a_layer_that_is_used_twice_are_numbered():
    inputs = layers.Input((3,))
    shared = layers.Dense(3, name="shared")
    links = links_of(keras.Model(inputs, shared(layers.ReLU()(shared(inputs)))))
    assert [link[0].number for link in links] == [0, 0, 1]
