"""Bytes as people write them: '16GiB', '12.3 MiB'."""

import re

from towers.errors import UserError

_UNITS = {
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
# More than any device has. A batch that fits 2**63 bytes has too many numbers for a tensor.
_MOST_TIB = 1024
_SHOWN = ("KiB", "MiB", "GiB", "TiB")


def bytes_from(flag: str, text: str) -> int:
    """The number of bytes that a flag's text names.

    Args:
      flag: the flag's name, for the error.
      text: a number and a unit, as '16GiB', '512 MiB' or '80GB'.

    Raises:
      UserError: the text is not a number with a unit, not above 0, or more than any device has.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    found = float(match.group(1)) * unit if match and unit else 0.0
    if found < 1:
        raise UserError(f"--{flag}={text}: give a number above 0 and a unit, as 16GiB, 512MiB or 80GB")
    if found > _MOST_TIB * _UNITS["tib"]:
        raise UserError(f"--{flag}={text}: no device has so much; give at most {_MOST_TIB}TiB")
    return int(found)


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
