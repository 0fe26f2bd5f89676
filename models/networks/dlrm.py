"""DLRM (Naumov et al. 2019, arXiv:1906.00091), a network for recommendations, in a small form.

    dense numbers [N, D] -> 32, ReLU -> width, ReLU      bottom
    ids of table t [N]   -> row of [rows, width]         one vector for each table
    dot products of all pairs of these T + 1 vectors     (T + 1) T / 2 numbers
    bottom and dot products -> 64, ReLU -> 32, ReLU -> 1 logit

With 8 tables of 1,000 rows of 16 numbers and 4 dense numbers: 134,193 parameters.

The ids of each Embedding are an input of the model, so the rows that a batch needs are known before the network
runs.
"""

from collections.abc import Sequence

import keras
import numpy as np
from keras import layers, ops

from models.networks.logits import logits_layer

_BOTTOM, _TOP = 32, (64, 32)


def dlrm(*, table_rows: Sequence[int], num_dense: int, width: int) -> keras.Model:
    """Builds the network.

    Args:
      table_rows: number of rows of each table.
      num_dense: number of dense numbers in an example.
      width: number of elements in a row of a table.

    Returns:
      A functional model to float32 logits [N, 1]. Its input is a dict: 'dense' float32 [N, num_dense], and for
      table t 'ids_t' int32 [N].
    """
    dense = layers.Input((num_dense,), name="dense")
    names = [f"ids_{table}" for table in range(len(table_rows))]
    ids = {name: layers.Input((), dtype="int32", name=name) for name in names}
    bottom = _dense(width, "bottom2")(_dense(_BOTTOM, "bottom1")(dense))
    rows = [
        layers.Embedding(num_rows, width, name=f"table_{table}")(ids[name])
        for table, (name, num_rows) in enumerate(zip(names, table_rows, strict=True))
    ]
    top = layers.Concatenate(name="bottom_and_pairs")([bottom, _pair_products([bottom, *rows])])
    for index, size in enumerate(_TOP, start=1):
        top = _dense(size, f"top{index}")(top)
    return keras.Model({"dense": dense, **ids}, logits_layer(1)(top), name="dlrm")


def _dense(size: int, name: str) -> layers.Dense:
    return layers.Dense(size, activation="relu", kernel_initializer="he_normal", name=name)


def _pair_products(vectors: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
    """Dot products of all pairs i < j of vectors [N, width]: [N, number of pairs]."""
    count = len(vectors)
    stacked = ops.stack(vectors, axis=1)
    products = ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))
    first, second = np.triu_indices(count, 1)
    # As int64: int32 is computed on the host, which would wait for a GPU's products in the backward pass.
    upper = first * count + second
    return ops.take(layers.Reshape((count * count,))(products), upper, axis=1)
