"""The strategies by name. A new one is one file and one row."""

import dataclasses
import difflib
from collections.abc import Callable

from strategies.contract import Strategy
from strategies.distribute.mirrored import mirrored_strategy
from strategies.ring.joining import Ring
from strategies.ring.strategy import ring_strategy
from strategies.servers.membership import ServersPlace, servers_strategy
from strategies.towers import towers_strategy
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task


@dataclasses.dataclass(frozen=True)
class _Mode:
    """How a strategy is made.

    Attributes:
      build: called with a task, devices, options and shares; and its process's place under the name of `meeting`.
      meeting: how its processes meet, 'ring' or 'servers'; '' where it is of one process.
    """

    build: Callable[..., Strategy]
    meeting: str = ""


_MODES = {
    "towers": _Mode(towers_strategy),
    "mirrored": _Mode(mirrored_strategy),
    "ring": _Mode(ring_strategy, meeting="ring"),
    "ps": _Mode(servers_strategy, meeting="servers"),
}


def strategy_names() -> tuple[str, ...]:
    """Names that `build_strategy` knows."""
    return tuple(_MODES)


def meeting(name: str) -> str:
    """How processes of this strategy meet before they build it: 'ring' (`ring.joining`), 'servers', or ''.

    Raises:
      UserError: a name that is not in the registry.
    """
    return _mode(name).meeting


def build_strategy(
    name: str,
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    ring: Ring | None = None,
    servers: ServersPlace | None = None,
) -> Strategy:
    """A strategy at its beginning: initial weights drawn from the options' seed.

    Args:
      name: in the registry.
      task: what is trained.
      devices: of this process.
      options: of the step.
      shares: how much of this process's part each of its towers takes.
      ring: for those that join one; None is a ring of one.
      servers: the chief's place, for parameter servers.

    Raises:
      UserError: a name that is not in the registry, or what the strategy itself refuses.
    """
    mode = _mode(name)
    if mode.meeting == "servers" and servers is None:
        raise UserError(
            f"strategy {name!r} is of several processes: start them all, as by "
            "python -m launch.local --chief --workers=2 --ps=1 -- python -m launch.train --strategy=ps"
        )
    places = {"ring": ring, "servers": servers}
    joined = {mode.meeting: places[mode.meeting]} if mode.meeting else {}
    return mode.build(task, devices, options, shares=shares, **joined)


def _mode(name: str) -> _Mode:
    if name not in _MODES:
        near = difflib.get_close_matches(name, _MODES, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_MODES)}"
        raise UserError(f"strategy {name!r} is unknown: {hint}")
    return _MODES[name]
