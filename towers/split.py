"""How a batch is divided: contiguous parts, even or by shares. Plain arithmetic, and the same in a graph.

Part i of N examples ends at ceil(N * (share_0 + ... + share_i) / sum of shares). So for any N every example is in
exactly one part, each part has its share to within one example, the first parts of a short batch get its examples,
and part 0 is never empty.

    5 examples over 4 towers:   [0 1] [2] [3] [4]
    1 example  over 4 towers:   [0] [] [] []
    7 examples, shares 5,3,2:   [0 1 2 3] [4 5] [6]
"""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.errors import UserError, counted

# Float64 rounding must not raise a boundary that is a whole number in exact arithmetic.
_ROUNDING = 1e-9


def even_shares(num_parts: int) -> tuple[float, ...]:
    """Equal shares for `num_parts` parts."""
    return (1.0,) * num_parts


def checked_shares(
    shares: Sequence[float] | None, num_parts: int, what: str, of: str = "tower"
) -> tuple[float, ...]:
    """`shares` as a tuple; equal shares for None.

    Args:
      shares: relative sizes of the parts.
      num_parts: number of parts.
      what: name of the argument, for messages.
      of: what gets a part, 'tower' or 'worker', for messages.

    Raises:
      UserError: the number of shares is not `num_parts`, or a share is not a positive number.
    """
    if shares is None:
        return even_shares(num_parts)
    try:
        shares = tuple(float(share) for share in shares)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}={shares!r}: must be a list of numbers, one for each {of}") from error
    written = _written(shares)
    if len(shares) != num_parts:
        given, parts = counted(len(shares), "share"), counted(num_parts, of)
        raise UserError(f"{what}={written}: {given} for {parts}; give one share for each {of}")
    if not all(share > 0 and math.isfinite(share) for share in shares):
        raise UserError(f"{what}={written}: every share is a positive number; omit a {of} instead of giving it 0")
    return shares


def given_shares(name: str, shares: Sequence[float]) -> str:
    """Shares as a user gave them, for messages; '' for equal ones, which need not be given."""
    return "" if len(set(shares)) <= 1 else f"{name}={_written(shares)}"


def _written(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)


def boundaries(num_examples: int, shares: Sequence[float]) -> list[int]:
    """[parts + 1] ascending indices b: part i has the examples b[i] to b[i + 1] - 1."""
    fractions = np.cumsum(shares) / np.sum(shares)
    return [0, *(int(end) for end in np.ceil(num_examples * fractions - _ROUNDING))]


def sizes(num_examples: int, shares: Sequence[float]) -> list[int]:
    """[parts] number of examples in each part; their sum is `num_examples`."""
    return np.diff(boundaries(num_examples, shares)).tolist()


def fewest_examples(batch_size: int, num_passes: int, shares: Sequence[float]) -> int:
    """The fewest examples of a full batch that a tower computes at once, at least 1.

    Args:
      batch_size: examples of a batch.
      num_passes: microbatches of a batch.
      shares: shares of all towers.
    """
    return max(1, min(sizes(min(sizes(batch_size, even_shares(num_passes))), shares)))


def bounds_in_graph(
    num_examples: tf.Tensor, shares: Sequence[float], index: int | tf.Tensor
) -> tuple[int | tf.Tensor, tf.Tensor]:
    """`boundaries` of one part in a graph: its first example and the first one after it.

    Uses few operations, because every tower calls it for every microbatch.

    Args:
      num_examples: int32 scalar.
      shares: shares of all parts.
      index: index of the part; a tensor in a loop over parts.

    Returns:
      int32 scalars; but the first example of part 0 is the Python number 0.
    """
    fractions = np.cumsum(shares) / np.sum(shares)
    if isinstance(index, tf.Tensor):
        all_ends = tf.concat([[0], _ends(num_examples, fractions)], axis=0)
        return tuple(tf.unstack(tf.slice(all_ends, [index], [2])))

    def end(part: int) -> tf.Tensor:
        return num_examples if part == len(shares) - 1 else _ends(num_examples, fractions[part])

    return end(index - 1) if index else 0, end(index)


def _ends(num_examples: tf.Tensor, fractions: np.ndarray) -> tf.Tensor:
    """int32, where the parts up to these fractions of all examples end."""
    ends = tf.math.ceil(tf.cast(num_examples, tf.float64) * fractions - _ROUNDING)
    return tf.cast(ends, tf.int32)


def check_batch_size(
    batch_size: int, accumulation: int, shares: Sequence[float], num_own: int | None = None, given: str = ""
) -> None:
    """Checks that a full batch has an example for every tower in each of its microbatches.

    Args:
      batch_size, accumulation: examples of a batch, and number of microbatches.
      shares: relative number of examples of each tower, over all processes.
      num_own: number of towers of this process; None for all.
      given: the shares as the user gave them, for messages; '' if they are `shares`.

    Raises:
      UserError: a microbatch would be empty, or a tower would get no example of it.
    """
    smallest = min(sizes(batch_size, even_shares(accumulation)))
    if smallest == 0:
        raise UserError(
            f"accumulation={accumulation} for a batch of {batch_size}: a microbatch needs at least one example; "
            f"use accumulation={batch_size} or less"
        )
    parts = sizes(smallest, shares)
    if min(parts) > 0:
        return
    of_what = "batch" if accumulation == 1 else f"microbatch (accumulation={accumulation})"
    if smallest < len(parts):
        is_alone = num_own is None or num_own == len(parts)
        fewer = f"num_towers={smallest}" if is_alone else f"at most {smallest} towers in all processes together,"
        raise UserError(
            f"{len(parts)} towers for a {of_what} of {smallest}: every tower needs at least one example; "
            f"use {fewer} or a {of_what} of {len(parts)} examples"
        )
    raise UserError(
        f"{given or given_shares('tower_shares', shares)}: a tower gets no example of a {of_what} of {smallest}; "
        "raise batch_size or the smallest share"
    )
