"""How layers can be split over devices: which dimension of which variable is cut, and with which collective.

    Dense, by columns       x [N, in]  ->  x kernel[:, own]                 all-gather of the outputs
    Dense, by rows          x[:, own] kernel[own, :]                        all-reduce of the outputs
    Embedding               rows of own ids, zeros for the others           all-reduce of the outputs
    MultiHeadAttention      own heads, and their part of the output kernel  all-reduce of the outputs
    Conv, output channels   conv(x, kernel[..., own])                       all-gather of the outputs
    Conv, input channels    conv(x[..., own], kernel[..., own, :])          all-reduce of the outputs

A layer split by columns that feeds a layer split by rows needs no all-gather: each device has what it reads
(Shoeybi et al. 2019, Megatron-LM, section 3). In the backward pass the collectives are reversed.
"""

import dataclasses
from collections.abc import Mapping

import keras
from keras import layers

COLUMNS, ROWS = "columns", "rows"
VOCABULARY, HEADS = "vocabulary", "heads"
OUTPUT_CHANNELS, INPUT_CHANNELS = "output_channels", "input_channels"
WHOLE = "whole"
SPLITS = (COLUMNS, ROWS, VOCABULARY, HEADS, OUTPUT_CHANNELS, INPUT_CHANNELS, WHOLE)
# By a layer's split, the split of a layer that can read its parts without an all-gather.
READS_PARTS_OF = {COLUMNS: ROWS, OUTPUT_CHANNELS: INPUT_CHANNELS}

ALL_GATHER, ALL_REDUCE = "all-gather", "all-reduce"

_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_EMBEDDINGS = (layers.Embedding, layers.ReversibleEmbedding)


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a split cuts.

    Attributes:
      units: number of columns, rows, ids, heads or channels, which are divided over the devices.
      dimensions: each variable that is cut, and its dimension that is cut, of length `units`.
      collective: what makes the layer's outputs whole.
    """

    units: int
    dimensions: tuple[tuple[keras.Variable, int], ...]
    collective: str


def cuts_of(layer: keras.layers.Layer) -> Mapping[str, Cut]:
    """The ways to split a layer, by name, the default first; empty for a layer that no rule splits."""
    if not layer.built or _has_other_weights(layer):
        return {}
    if type(layer) is layers.Dense:
        return _dense(layer)
    if type(layer) in _EMBEDDINGS:
        return _embedding(layer)
    if type(layer) is layers.MultiHeadAttention:
        return _attention(layer)
    return _convolution(layer) if type(layer) in _CONVOLUTIONS else {}


def projections(layer: layers.MultiHeadAttention) -> Mapping[str, layers.EinsumDense]:
    """The layers of an attention that compute something for each head, by attribute name."""
    names = ("_query_dense", "_key_dense", "_value_dense", *(["_gate_dense"] if layer._use_gate else []))
    return {name: getattr(layer, name) for name in names}


def _has_other_weights(layer) -> bool:
    """Whether its kernel is computed from other weights (LoRA, quantization)."""
    return bool(getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None))


def _dense(layer):
    bias = () if layer.bias is None else ((layer.bias, 0),)
    return {
        COLUMNS: Cut(layer.units, ((layer.kernel, 1), *bias), ALL_GATHER),
        ROWS: Cut(layer.kernel.shape[0], ((layer.kernel, 0),), ALL_REDUCE),
    }


def _embedding(layer):
    found, collective = ((layer.embeddings, 0),), ALL_REDUCE
    if type(layer) is layers.ReversibleEmbedding:
        if layer.mask_zero:
            return {}
        if not layer.tie_weights:
            found += ((layer.reverse_embeddings, 1),)
        collective = f"{ALL_REDUCE} of rows, {ALL_GATHER} of logits"
    return {VOCABULARY: Cut(layer.input_dim, found, collective)}


def _attention(layer):
    # Each device would draw its own dropout mask, so the numbers would depend on the number of devices.
    if layer.dropout:
        return {}
    # A penalty on the projections' outputs needs their own calls, and for the last projection the whole output.
    if layer._activity_regularizer is not None:
        return {}
    if any(map(_has_other_weights, (*projections(layer).values(), layer._output_dense))):
        return {}
    kernels = [(of_head.kernel, 1) for of_head in projections(layer).values()]
    biases = [(of_head.bias, 0) for of_head in projections(layer).values() if of_head.bias is not None]
    output = (layer._output_dense.kernel, 0)
    return {HEADS: Cut(layer.num_heads, (*kernels, *biases, output), ALL_REDUCE)}


def _convolution(layer):
    # For causal convolutions Keras pads in the layer's own call.
    if layer.groups != 1 or layer.data_format != "channels_last" or layer.padding == "causal":
        return {}
    bias = ((layer.bias, 0),) if layer.use_bias else ()
    rank = len(layer.kernel.shape)
    return {
        OUTPUT_CHANNELS: Cut(layer.filters, ((layer.kernel, rank - 1), *bias), ALL_GATHER),
        INPUT_CHANNELS: Cut(layer.kernel.shape[-2], ((layer.kernel, rank - 2),), ALL_REDUCE),
    }
