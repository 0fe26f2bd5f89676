"""How a batch is divided: contiguous parts, even or by shares. Plain arithmetic, and the same in a graph.

Part i of N examples ends at ceil(N * (share_0 + ... + share_i) / sum of shares). So every example is in
exactly one part for any N, the parts of a full batch are as the shares ask to within one example, what is
left of a batch goes to the first towers, and part 0 is never empty.

    5 examples over 4 towers:   [0 1] [2] [3] [4]
    1 example  over 4 towers:   [0] [] [] []
    7 examples, shares 5,3,2:   [0 1 2 3] [4 5] [6]
"""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.errors import UserError

# A boundary that is a whole number in exact arithmetic must not be pushed up by float64 rounding.
_ROUNDING = 1e-9


def even_shares(num_parts: int) -> tuple[float, ...]:
    """Equal shares for `num_parts` parts."""
    return (1.0,) * num_parts


def checked_shares(
    shares: Sequence[float] | None, num_parts: int, what: str, of: str = "tower"
) -> tuple[float, ...]:
    """`shares` as a tuple, or equal ones for None.

    Raises:
      UserError: not one share a part, or a share that is not a positive number.
    """
    if shares is None:
        return even_shares(num_parts)
    shares = tuple(float(share) for share in shares)
    written = ",".join(f"{share:g}" for share in shares)
    if len(shares) != num_parts:
        raise UserError(f"{what}={written} names {len(shares)} for {num_parts} {of}s: give one share a {of}")
    if not all(share > 0 and math.isfinite(share) for share in shares):
        raise UserError(f"{what}={written}: every share is a positive number; leave a {of} out instead of 0")
    return shares


def boundaries(num_examples: int, shares: Sequence[float]) -> list[int]:
    """[parts + 1] ascending positions; part i is examples [b[i], b[i + 1])."""
    fractions = np.cumsum(shares) / np.sum(shares)
    return [0, *(int(end) for end in np.ceil(num_examples * fractions - _ROUNDING))]


def sizes(num_examples: int, shares: Sequence[float]) -> list[int]:
    """[parts] examples in each part; they sum to `num_examples`."""
    return np.diff(boundaries(num_examples, shares)).tolist()


def boundaries_tensor(num_examples: tf.Tensor, shares: Sequence[float]) -> tf.Tensor:
    """`boundaries` for a number of examples known only when the graph runs: int32 [parts + 1]."""
    fractions = tf.constant(np.cumsum(shares) / np.sum(shares), tf.float64)
    ends = tf.math.ceil(tf.cast(num_examples, tf.float64) * fractions - _ROUNDING)
    return tf.concat([[0], tf.cast(ends, tf.int32)], axis=0)


def check_batch_feeds_all(batch_size: int, shares: Sequence[float], what: str = "towers") -> None:
    """A full batch must give every tower something to do.

    Raises:
      UserError: some part of a full batch would be empty.
    """
    parts = sizes(batch_size, shares)
    if min(parts) > 0:
        return
    if batch_size < len(parts):
        raise UserError(
            f"{len(parts)} {what} for a batch of {batch_size}: each takes at least one example; "
            f"use --num_towers={max(batch_size, 1)} or a batch of {len(parts)}"
        )
    raise UserError(
        f"shares {','.join(f'{share:g}' for share in shares)} leave one of the {what} without an example "
        f"of a batch of {batch_size}: raise --batch_size or the smallest share"
    )
