"""Which layers and activations are element-wise, and which layer feeds another through element-wise ones only."""

from collections.abc import Callable

import keras
from keras import activations, layers

_FUNCTIONS = (
    activations.celu,
    activations.elu,
    activations.exponential,
    activations.gelu,
    activations.hard_sigmoid,
    activations.hard_silu,
    activations.leaky_relu,
    activations.linear,
    activations.mish,
    activations.relu,
    activations.relu6,
    activations.selu,
    activations.sigmoid,
    activations.silu,
    activations.softplus,
    activations.softsign,
    activations.tanh,
)
_LAYERS = (layers.ReLU, layers.LeakyReLU, layers.ELU)


def is_elementwise(activation: Callable | None) -> bool:
    """Whether an activation is one of Keras's element-wise ones, or None."""
    # By identity: a custom activation may be neither hashable nor comparable.
    return activation is None or any(activation is function for function in _FUNCTIONS)


def is_elementwise_layer(layer: keras.layers.Layer) -> bool:
    """Whether it is one of Keras's element-wise layers that draw no random numbers."""
    if type(layer) is layers.Activation:
        return is_elementwise(layer.activation)
    return type(layer) in _LAYERS


def feeder(layer: keras.layers.Layer) -> keras.layers.Layer | None:
    """The layer whose outputs reach this one through element-wise layers alone.

    Returns None for a layer that functional models call never, several times or with several inputs.
    """
    tensors = [tensor for node in layer._inbound_nodes for tensor in node.input_tensors]
    if len(tensors) != 1:
        return None
    before, node_index, _ = tensors[0]._keras_history
    while is_elementwise_layer(before):
        (tensor,) = before._inbound_nodes[node_index].input_tensors
        before, node_index, _ = tensor._keras_history
    return before
