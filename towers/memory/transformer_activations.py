"""Bytes per device that the forward pass of a transformer layer keeps for the backward pass.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198,
section 4 and table 2. Sequence length s, microbatch b, hidden size h, a attention heads, t slices of each layer
(tensor parallelism); 16-bit activations and dropout masks of a byte. A layer keeps

    attention     its input 2sbh, dropout mask sbh;                      slices: Q and K 4sbh, V 2sbh, output 2sbh,
                                                                         softmax, its dropout and mask 5as^2b
    MLP           its input 2sbh, dropout mask sbh;                      slices: GELU's input 8sbh and output 8sbh
    layer norms   their inputs 4sbh

What slices hold is divided by t, the rest only if the sequence is sliced too (sequence parallelism):

    no slices                    sbh (34 + 5as/h)
    slices                       sbh (10 + 24/t + 5as/(ht))
    slices of the sequence too   sbh (34/t + 5as/(ht))
    selective recomputation      the same without 5as/h
    full recomputation           2sbh, the layer's input
"""

import dataclasses
import enum

from towers.errors import UserError


class Recomputation(enum.StrEnum):
    """What the backward pass computes again instead of keeping it."""

    NONE = "none"
    # Softmax, its dropout, and the products before and after it: much memory, little computation.
    SELECTIVE = "selective"
    # Everything inside a layer.
    FULL = "full"


@dataclasses.dataclass(frozen=True)
class TransformerLayer:
    """The sizes of one layer's input: s, b, h and a of the formulas."""

    sequence_length: int
    microbatch_size: int
    hidden_size: int
    num_heads: int


@dataclasses.dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer keeps on each device."""

    attention_bytes: float
    mlp_bytes: float
    layer_norms_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.attention_bytes + self.mlp_bytes + self.layer_norms_bytes


def layer_activations(
    layer: TransformerLayer,
    *,
    num_slices: int = 1,
    sequence_is_sliced: bool = False,
    recomputation: Recomputation = Recomputation.NONE,
) -> LayerActivations:
    """Bytes that one layer keeps for one microbatch on each of its devices.

    Args:
      layer: the sizes of its input.
      num_slices: devices over which the heads and the MLP are divided.
      sequence_is_sliced: whether layer norms, dropouts and the inputs of blocks are divided over these devices
        too.
      recomputation: what is computed again. With FULL and a sliced sequence, the layer's input is divided too.

    Raises:
      UserError: `num_slices` is below 1.
    """
    if num_slices < 1:
        raise UserError(f"slices={num_slices}: a layer has at least one slice; give 1 or more")
    elements = layer.sequence_length * layer.microbatch_size * layer.hidden_size
    # Bytes that every device keeps for each element, whole or sliced, and their divisor.
    common = num_slices if sequence_is_sliced else 1
    if recomputation is Recomputation.FULL:
        # The layer's input is that of its first layer norm.
        return LayerActivations(0.0, 0.0, 2 * elements / common)
    scores = 0 if recomputation is Recomputation.SELECTIVE else 5 * layer.num_heads * layer.sequence_length
    scores_bytes = scores * layer.sequence_length * layer.microbatch_size
    return LayerActivations(
        attention_bytes=3 * elements / common + (8 * elements + scores_bytes) / num_slices,
        mlp_bytes=3 * elements / common + 16 * elements / num_slices,
        layer_norms_bytes=4 * elements / common,
    )
