"""Gathers for all towers of a process, whose graphs are copies of the first tower's in one graph.

    gather of a unit --+--> tower 0, CPU:0 --+
                       |                     +--> sum --> scatter of gradients
                       +--> tower 1, CPU:1 --+

So a process gathers each unit once and sends each gradient once, whatever its number of towers. Units and calls
are those of the first tower, so processes with other numbers of towers make the same ones.
"""

from collections.abc import Sequence

from towers.gathering.units import Use
from towers.together.copies_in_one import device_in, name_in


def units_of_all(units: Sequence[Sequence[Use]], towers: Sequence[Sequence[str]]) -> list[list[Use]]:
    """The uses that each gather serves, in all towers; each unit begins with the first tower's.

    Args:
      units: the units of the first tower.
      towers: the devices of each tower, as for `copies_in_one`.
    """
    if len(towers) == 1:
        return [list(unit) for unit in units]
    return [[_use_in(tower, use, towers) for tower in range(len(towers)) for use in unit] for unit in units]


def _use_in(tower: int, use: Use, towers) -> Use:
    return use._replace(
        node=name_in(tower, use.node),
        through=tuple(name_in(tower, name) for name in use.through),
        device=device_in(tower, use.device, towers),
    )
