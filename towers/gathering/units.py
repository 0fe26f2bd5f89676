"""Which uses of parameters one gather serves, and how many bytes of gathered parameters are alive: plain data.

The uses, in the order of the computation, are cut into units. A tower gathers the parameters of a unit while it
computes the one before, and frees them after the unit:

    compute   unit 0   unit 1   unit 2
    gather    unit 1   unit 2   unit 3        two units are alive at any time

In a tower of several devices each device has units of its own.
"""

import itertools
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
      position: index of the operation's input that reads the parameter.
      through: operations that only convert the parameter on the way to it (casts, transposes), in order.
      device: the operation's device; '' for that of a tower of one device.
    """

    level: int
    parameter: int
    node: str
    position: int
    through: tuple[str, ...] = ()
    device: str = ""


def units_of(uses: Sequence[Use], num_bytes: Sequence[int], *, small_bytes: int = 0) -> list[list[Use]]:
    """The uses in units, each with parameters of at most 1.25 times the bytes of the largest one or `small_bytes`.

    A unit is larger if a single operation uses more, such as the loop of stacked recurrent cells: all uses of an
    operation are in one unit. Otherwise the third gather for a loop would wait for the unit of its first gather,
    which contains the loop itself.

    All uses of a unit are on one device, and "largest" refers to the parameters of that device. Levels never fall
    from a unit to the device's next one, so nothing in a unit depends on a later unit. A gather that waits for an
    earlier unit of its device never waits for itself: along a chain of dependencies levels only rise, or stay
    equal within the units of one device, in their order.

    Args:
      uses: uses in any order.
      num_bytes: bytes of each parameter.
      small_bytes: size up to which all gathers cost the same.
    """
    found: list[list[Use]] = []
    by_device = sorted(uses, key=lambda use: (use.device, use))
    for _, own in itertools.groupby(by_device, key=lambda use: use.device):
        found += _units_of_device(list(own), num_bytes, small_bytes)
    return found


def _units_of_device(uses: Sequence[Use], num_bytes: Sequence[int], small_bytes: int) -> list[list[Use]]:
    """The units of uses on one device, which are in order."""
    limit = max(small_bytes, _SMALL_BESIDE_LARGE * max(num_bytes[use.parameter] for use in uses))
    by_operation: dict[str, list[Use]] = {}
    for use in uses:
        by_operation.setdefault(use.node, []).append(use)
    units: list[list[Use]] = []
    for own in by_operation.values():
        if not units or bytes_of([*units[-1], *own], num_bytes) > limit:
            units.append([])
        units[-1] += own
    return units


def waited_for(units: Sequence[Sequence[Use]]) -> list[Sequence[Use]]:
    """For each unit, the one after which it may be gathered: two units earlier on its device; or empty."""
    found: list[Sequence[Use]] = []
    of_devices: dict[str, list[Sequence[Use]]] = {}
    for unit in units:
        own = of_devices.setdefault(unit[0].device, [])
        found.append(own[-2] if len(own) >= 2 else ())
        own.append(unit)
    return found


def bytes_of(unit: Sequence[Use], num_bytes: Sequence[int]) -> int:
    """Bytes of the parameters of a unit; a parameter that it uses several times counts once."""
    return sum(num_bytes[parameter] for parameter in {use.parameter for use in unit})
