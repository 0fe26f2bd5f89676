"""The two splits of every data set."""

from towers.errors import UserError

SPLITS = ("train", "eval")


def checked_split(split: str) -> str:
    """`split` itself.

    Raises:
      UserError: `split` is neither 'train' nor 'eval'.
    """
    if split not in SPLITS:
        raise UserError(f"split={split!r}: must be 'train' or 'eval'")
    return split
