"""Which uses of parameters one gather serves, and how many bytes of gathered parameters are alive: plain data.

The uses, in the order of the computation, are cut into units. A tower gathers the parameters of a unit while it
computes the one before, and frees them after the unit:

    compute   unit 0   unit 1   unit 2
    gather    unit 1   unit 2   unit 3        two units are alive at any time
"""

from collections.abc import Sequence
from typing import NamedTuple

# A unit may exceed the largest parameter by this factor, so that a bias is gathered with its kernel.
_SMALL_BESIDE_LARGE = 1.25


class Use(NamedTuple):
    """An operation's use of a parameter.

    Attributes:
      level: position in the order of the computation; an operation's level exceeds that of all it depends on.
      parameter: index of the parameter.
      node: name of the operation.
      position: which of its inputs.
      through: operations that only convert the parameter on the way to it (casts, transposes), in order.
    """

    level: int
    parameter: int
    node: str
    position: int
    through: tuple[str, ...] = ()


def units_of(uses: Sequence[Use], num_bytes: Sequence[int], *, small_bytes: int = 0) -> list[list[Use]]:
    """The uses in units, each with parameters of at most 1.25 times the bytes of the largest one or `small_bytes`.

    Because uses of a unit have levels up to those of the next unit, nothing in a unit depends on a later one. So a
    gather that waits for an earlier unit never waits for itself.

    Args:
      uses: in any order.
      num_bytes: of each parameter.
      small_bytes: up to this size a gather costs as much as a smaller one.
    """
    limit = max(small_bytes, _SMALL_BESIDE_LARGE * max(num_bytes, default=0))
    units: list[list[Use]] = []
    for use in sorted(uses):
        if not units or bytes_of([*units[-1], use], num_bytes) > limit:
            units.append([])
        units[-1].append(use)
    return units


def bytes_of(unit: Sequence[Use], num_bytes: Sequence[int]) -> int:
    """Bytes of the parameters of a unit; a parameter that it uses several times counts once."""
    return sum(num_bytes[parameter] for parameter in {use.parameter for use in unit})
