"""Whether the workers of a ring read the same batches, each its part of them."""

from collections.abc import Sequence

import numpy as np

from strategies.data_checks.batch_checksums import KEEPS_ORDER_ADVICE, BatchChecksums
from towers.errors import UserError

SPLITS = ("train", "eval")
_UNEVEN = "so some examples would count twice and others not at all"


def check_same_batches(names: Sequence[str], found: np.ndarray, *, microbatches: int) -> None:
    """Compares what the workers read.

    Args:
      names: the workers' names, by rank.
      found: [workers, splits, n], `BatchChecksums.numbers` of each split.
      microbatches: how often a worker reads the training data: once for each microbatch.

    Raises:
      UserError: a worker reads other batches than the first worker, or different ones for each microbatch.
    """
    for index, split in enumerate(SPLITS):
        first, *others = (BatchChecksums.from_numbers(numbers) for numbers in found[:, index])
        for name, other in zip(names[1:], others, strict=True):
            _check_same(split, f"{name} and {names[0]} read different", first, other)
        if split == "train" and microbatches > 1 and not first.keeps_order:
            raise UserError(
                f"{names[0]} reads the {split!r} data in another order each time, and once for each of the "
                f"{microbatches} microbatches of a batch, {_UNEVEN}; {KEEPS_ORDER_ADVICE}"
            )


def _check_same(split: str, both_read: str, first: BatchChecksums, other: BatchChecksums) -> None:
    if other.examples != first.examples:
        raise UserError(
            f"{both_read} batches of {split!r}: each computes its part of a batch, {_UNEVEN}; if the data are "
            "shuffled, use shuffle(..., seed=1)"
        )
    if other.features and first.features and other.features != first.features:
        raise UserError(
            f"{both_read} features of {split!r}, with the same labels: correct the data of one of them; if they "
            "are augmented with a seed, use the same seed in all processes"
        )
