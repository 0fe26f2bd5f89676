"""The time of steps by the kind of their operations, from a trace."""

import collections
import re
from collections.abc import Iterable, Mapping

from towers.timeline.operations import TracedOperation

OTHER = "other operations"
# The first pattern found in an operation's type gives its kind. Types of oneDNN's and of fused operations contain
# the name of the operation that they replace: _MklNativeConv2DBackpropInput, _FusedConv2D.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("convolutions, gradients of kernels", "Conv.*BackpropFilter"),
        ("convolutions, gradients of inputs", "Conv.*BackpropInput"),
        ("convolutions, forward", "Conv[123]D|DepthwiseConv"),
        ("batch norm, gradients", "BatchNormGrad"),
        ("batch norm, forward", "BatchNorm"),
        ("pooling", "Pool"),
        ("ReLU", "Relu"),
        # A function that XLA compiles remains a call.
        ("compiled by XLA (GELU, SiLU, batch norm, tiles of images)", "Xla|PartitionedCall"),
        ("matrix products", "MatMul|Einsum"),
        ("updates of parameters", "ResourceApply|ResourceScatter|Assign"),
        ("additions", "^(_Mkl)?(Native)?Add"),
        ("sums and extremes", "^(Sum|Mean|Max|Min|ArgMax|_MklNativeMean)"),
        ("casts", "Cast"),
        ("copies and layouts", "Transpose|Reshape|Concat|Slice|Split|Pad|Pack|Tile|Gather|Identity|_MklToTf"),
    )
)


def kind_of(operation_type: str) -> str:
    """The kind of an operation of this type, such as 'additions' for 'AddV2'."""
    return next((kind for kind, pattern in _KINDS if pattern.search(operation_type)), OTHER)


def shares_by_kind(operations: Iterable[TracedOperation]) -> Mapping[str, float]:
    """Share of all operations' time by kind, the largest first; the sum is 1.

    On devices with one thread this is their share of the CPU time, even if other programs use the same cores:
    these lengthen all operations in proportion.

    Args:
      operations: at least one operation; operations that wait for other processes do not count.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    for one in operations:
        if not one.waits:
            seconds[kind_of(one.operation_type)] += one.end_seconds - one.start_seconds
    total = sum(seconds.values())
    return {kind: of_kind / total for kind, of_kind in sorted(seconds.items(), key=lambda item: -item[1])}
