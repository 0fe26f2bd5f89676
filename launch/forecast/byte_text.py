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
    """The number of bytes that a flag's text names.

    Args:
      flag: the flag's name, for the error.
      text: a number and a unit, as '16GiB', '512 MiB' or '80GB'.

    Raises:
      UserError: the text is not a number with a unit, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    found = int(float(match.group(1)) * unit) if match and unit else 0
    if found <= 0:
        raise UserError(f"--{flag}={text}: give a number above 0 and a unit, as 16GiB, 512MiB or 80GB")
    return found


def unit_for(count: float) -> str:
    """The unit, such as 'MiB', in which `count` bytes have at most three digits before the point."""
    return next((unit for unit in _SHOWN if count < 999.5 * _bytes_of(unit)), _SHOWN[-1])


def in_unit(count: float, unit: str) -> str:
    """Bytes in a unit, with three digits but at most two after the point: '123', '12.3', '0.12', '<0.01', '0'."""
    size = count / _bytes_of(unit)
    if 0 < size < 0.01:
        return "<0.01"
    return f"{size:.0f}" if size == 0 or size >= 99.95 else f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"


def byte_text(count: float) -> str:
    """Bytes with three digits: '12.3 MiB'."""
    unit = unit_for(count)
    return f"{count / _bytes_of(unit):.3g} {unit}"


def _bytes_of(unit: str) -> int:
    return _UNITS[unit.lower()]
