"""Arguments and results of a pass that computes several towers: where towers differ, a value for each."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class PerTower:
    """A value for each tower, in place of one.

    Attributes:
      values: by tower.
    """

    values: Sequence


def for_each_tower(given: Sequence):
    """One structure of `PerTower` from the arguments of each tower.

    Args:
      given: for each tower a tuple, perhaps nested; all have the same structure. Each item that is not a tuple
        becomes a `PerTower`.
    """
    if type(given[0]) is not tuple:
        return PerTower(tuple(given))
    return tuple(for_each_tower(values) for values in zip(*given, strict=True))


def of_tower(value, tower: int):
    """A tower's own value. Lists are searched for `PerTower`; any other value is the same for all towers."""
    if isinstance(value, list):
        return [of_tower(one, tower) for one in value]
    return value.values[tower] if isinstance(value, PerTower) else value
