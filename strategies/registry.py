"""The strategies by name. A new one is one file and one row."""

import difflib

from strategies.contract import Strategy
from strategies.mirrored import mirrored_strategy
from strategies.towers import towers_strategy
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task

_BUILDERS = {"towers": towers_strategy, "mirrored": mirrored_strategy}


def strategy_names() -> tuple[str, ...]:
    """Names that `build_strategy` knows."""
    return tuple(_BUILDERS)


def build_strategy(
    name: str,
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
) -> Strategy:
    """A strategy at its beginning: initial weights drawn from the options' seed.

    Raises:
      UserError: a name that is not in the registry, or what the strategy itself refuses.
    """
    if name not in _BUILDERS:
        near = difflib.get_close_matches(name, _BUILDERS, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_BUILDERS)}"
        raise UserError(f"strategy {name!r} is unknown: {hint}")
    return _BUILDERS[name](task, devices, options, shares=shares)
