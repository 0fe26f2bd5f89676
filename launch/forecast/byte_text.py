"""Bytes as people write them: '16GiB', '12.3 MiB'."""

import re

from towers.errors import UserError

_UNITS = {
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
_SHOWN = ("KiB", "MiB", "GiB", "TiB")


def bytes_from(flag: str, text: str) -> int:
    """The bytes that a flag's text means.

    Args:
      flag: the flag's name, for the error.
      text: a number and a unit, as '16GiB', '512 MiB' or '80GB'.

    Raises:
      UserError: it is no number with a unit, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    found = int(float(match.group(1)) * unit) if match and unit else 0
    if found <= 0:
        raise UserError(f"--{flag}={text}: give a number above 0 and a unit, as 16GiB, 512MiB or 80GB")
    return found


def byte_text(count: float) -> str:
    """Bytes with three digits: '12.3 MiB'."""
    size, unit = count / 1024, _SHOWN[0]
    for larger in _SHOWN[1:]:
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
