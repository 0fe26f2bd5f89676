"""A decoder-only transformer language model, with layer norms before each part (Radford et al. 2019).

    tokens [N, T] -> row of the token table + row of the position table         [N, T, width]
    each block:  x + attention(norm(x)), causal, of `heads` heads
                 x + 4 width, GELU, width of norm(x)
    norm, times the token table transposed (tied weights)                        [N, T, vocabulary] logits

Parameters: vocabulary * width + T * width + blocks * (12 width**2 + 9 width) + 2 width. With a vocabulary of 32
and T = 64:

    transformer_tiny      2 blocks of width 32, 2 heads          28,288 parameters
    transformer           4 blocks of width 64, 4 heads         205,184 parameters
    transformer_medium    6 blocks of width 384, 6 heads     10,675,200 parameters
    transformer_large     12 blocks of width 768, 12 heads   85,092,864 parameters

A position attends to itself and to those before it. So padding at the end of a text changes no logits before it,
and needs no mask; the logits of the padding itself mean nothing, and the loss leaves them out.

Each block is one layer of the model, a functional model of its own, so the graph between blocks is a chain. A
weight's path contains its block: 'block_0/attention/query/kernel'.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import keras
import numpy as np
from keras import layers, ops

from models.field_checks import check_at_least_1
from towers.errors import UserError

_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """Sizes of a transformer.

    Attributes:
      blocks: number of blocks.
      width: number of elements of a position's vector.
      heads: number of attention heads of a block; the width is a multiple of it.

    Raises:
      UserError: a number is below 1, or the width is not a multiple of the number of heads.
    """

    blocks: int
    width: int
    heads: int

    def __post_init__(self):
        check_at_least_1(self, *(field.name for field in dataclasses.fields(self)))
        if self.width % self.heads:
            raise UserError(
                f"width={self.width}, heads={self.heads}: the width must be a multiple of the number of heads; "
                f"use for example width={self.heads * -(-self.width // self.heads)}"
            )


TRANSFORMERS: Mapping[str, TransformerSize] = MappingProxyType(
    {
        "transformer": TransformerSize(blocks=4, width=64, heads=4),
        "transformer_tiny": TransformerSize(blocks=2, width=32, heads=2),
        "transformer_medium": TransformerSize(blocks=6, width=384, heads=6),
        "transformer_large": TransformerSize(blocks=12, width=768, heads=12),
    }
)


def transformer(size: TransformerSize, *, num_tokens: int, length: int, dropout: float = 0.0) -> keras.Model:
    """Builds the network.

    Args:
      size: the network's sizes.
      num_tokens: size of the vocabulary.
      length: number T of positions.
      dropout: share of the elements that training sets to 0 in the embeddings and in the output of each attention
        and each MLP.

    Returns:
      A functional model from tokens int32 [N, T] to logits [N, T, num_tokens] in at least float32.
    """
    wide = keras.backend.result_type(keras.config.dtype_policy().compute_dtype, "float32")
    tokens = layers.Input((length,), dtype="int32", name="tokens")
    table = layers.ReversibleEmbedding(
        num_tokens, size.width, embeddings_initializer=_normal(size), reverse_dtype=wide, name="token_embedding"
    )
    positions = layers.Embedding(
        length, size.width, embeddings_initializer=_normal(size), name="position_embedding"
    )
    outputs = layers.Add(name="embeddings")([table(tokens), positions(_positions(tokens, length))])
    outputs = _dropped(outputs, dropout, "embedding_dropout")
    for index in range(size.blocks):
        outputs = _block(f"block_{index}", size, length, dropout)(outputs)
    logits = table(_norm("final_norm")(outputs), reverse=True)
    return keras.Model(tokens, layers.Activation("linear", dtype=wide, name="logits")(logits), name="transformer")


def _positions(tokens: keras.KerasTensor, length: int) -> keras.KerasTensor:
    """int64 [1, T]: 0, 1, 2, ... One row for all texts, so that the table's gradient has T rows, not N * T.

    Made from `tokens`, because a layer needs a tensor that depends on the model's input. int64, because with a GPU
    the host would slice int32.
    """
    return ops.subtract(np.arange(length), ops.zeros_like(ops.cast(tokens, "int64")[:1, :]))


def _block(name: str, size: TransformerSize, length: int, dropout: float) -> keras.Model:
    """A block, from [N, T, width] to the same shape."""
    # Keras casts a model's inputs to the dtype of its Input, which is float32 by default.
    compute_dtype = keras.config.dtype_policy().compute_dtype
    # The scope puts the block's name before the paths of its weights.
    with keras.name_scope(name):
        inputs = layers.Input((length, size.width), dtype=compute_dtype, name="inputs")
        # No biases: the gradient of the keys' bias would be nothing but rounding errors, which Adam would amplify.
        attention = layers.MultiHeadAttention(
            size.heads,
            size.width // size.heads,
            use_bias=False,
            kernel_initializer=_normal(size),
            name="attention",
        )
        normed = _norm("attention_norm")(inputs)
        attended = _dropped(attention(normed, normed, use_causal_mask=True), dropout, "attention_dropout")
        middle = layers.Add(name="attention_sum")([inputs, attended])
        hidden = _dense(4 * size.width, size, "mlp_up", activation="gelu")(_norm("mlp_norm")(middle))
        changed = _dropped(_dense(size.width, size, "mlp_down")(hidden), dropout, "mlp_dropout")
        return keras.Model(inputs, layers.Add(name="mlp_sum")([middle, changed]), name=name)


def _norm(name: str) -> layers.LayerNormalization:
    return layers.LayerNormalization(epsilon=_NORM_EPSILON, name=name)


def _dense(units: int, size: TransformerSize, name: str, activation: str | None = None) -> layers.Dense:
    return layers.Dense(units, activation=activation, kernel_initializer=_normal(size), name=name)


def _dropped(outputs: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    return layers.Dropout(rate, name=name)(outputs) if rate else outputs


def _normal(size: TransformerSize) -> keras.initializers.Initializer:
    """An initializer for one layer: if it were called for two layers, it would draw the same numbers for both."""
    return keras.initializers.RandomNormal(stddev=0.5 / math.sqrt(size.width))
