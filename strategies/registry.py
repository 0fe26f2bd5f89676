"""The strategies by name. A new one is one file and one row."""

import dataclasses
import difflib
from collections.abc import Callable

from strategies.contract import Strategy
from strategies.joining import Ring
from strategies.mirrored import mirrored_strategy
from strategies.ring import ring_strategy
from strategies.towers import towers_strategy
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task


@dataclasses.dataclass(frozen=True)
class _Mode:
    """How a strategy is made.

    Attributes:
      build: called with a task, devices, options and shares; and `ring=`, if it joins one.
      joins_ring: whether its processes form a ring.
    """

    build: Callable[..., Strategy]
    joins_ring: bool = False


_MODES = {
    "towers": _Mode(towers_strategy),
    "mirrored": _Mode(mirrored_strategy),
    "ring": _Mode(ring_strategy, joins_ring=True),
}


def strategy_names() -> tuple[str, ...]:
    """Names that `build_strategy` knows."""
    return tuple(_MODES)


def joins_ring(name: str) -> bool:
    """Whether processes of this strategy join a ring (`strategies.joining`) before they build it.

    Raises:
      UserError: a name that is not in the registry.
    """
    return _mode(name).joins_ring


def build_strategy(
    name: str,
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    ring: Ring | None = None,
) -> Strategy:
    """A strategy at its beginning: initial weights drawn from the options' seed.

    Args:
      name: in the registry.
      task: what is trained.
      devices: of this process.
      options: of the step.
      shares: how much of this process's part each of its towers takes.
      ring: for those that join one; None is a ring of one.

    Raises:
      UserError: a name that is not in the registry, or what the strategy itself refuses.
    """
    mode = _mode(name)
    joined = {"ring": ring} if mode.joins_ring else {}
    return mode.build(task, devices, options, shares=shares, **joined)


def _mode(name: str) -> _Mode:
    if name not in _MODES:
        near = difflib.get_close_matches(name, _MODES, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_MODES)}"
        raise UserError(f"strategy {name!r} is unknown: {hint}")
    return _MODES[name]
