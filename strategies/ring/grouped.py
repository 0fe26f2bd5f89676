r"""Towers of several devices on the workers of a ring: their devices have stages, slices or branches of the model.

    worker 0    stage 0 on CPU:0 --+      stage 1 on CPU:1 --+      sums over microbatches and own towers
    worker 1    stage 0 on CPU:0 --+      stage 1 on CPU:1 --+      then over the workers, stage by stage

Every worker divides the model alike, so each device exchanges with its counterparts.
"""

from collections.abc import Mapping

from strategies.branches import BranchedTowers
from strategies.grouped_towers import OPTIONS_BY_AXIS, Decided, GroupedTowers
from strategies.pipeline import StagedTowers
from strategies.ring.exchange.collectives import HostExchange, WireOptions
from strategies.slices import SlicedTowers
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task

_TOWERS = {towers.axis: towers for towers in (StagedTowers, SlicedTowers, BranchedTowers)}


def grouped_towers_of(
    task: Task, devices: Devices, options: StepOptions, wire: WireOptions, of_towers: Mapping[str, object]
) -> GroupedTowers | None:
    """The towers of this worker; None if each is one device.

    Args:
      task, devices, options: as for every strategy.
      wire: how the workers exchange gradients.
      of_towers: how towers are divided, by axis of `towers.grid`: `PipelineOptions`, `SliceOptions`,
        `BranchOptions`, or None for an axis that they are not divided along.

    Raises:
      UserError: options don't fit such towers, several axes are given, or devices have groups but no axis is
        given.
    """
    given = {axis: found for axis, found in of_towers.items() if found is not None}
    if not given:
        if devices.groups:
            raise UserError(
                "towers of several devices with strategy 'ring': pass pipeline= if these are stages, slices= if "
                "they divide layers, or branches= if they divide branches"
            )
        return None
    if len(given) > 1:
        named = " and ".join(f"{OPTIONS_BY_AXIS[axis]}=" for axis in given)
        raise UserError(f"{named} with strategy 'ring': a tower has stages, slices or branches; omit all but one")
    if devices.spread and not devices.zero:
        raise UserError(
            f"{devices.spread} with towers of several devices on a ring: their workers divide parameters by ZeRO "
            "alone; use zero=3, or towers of one device"
        )
    if wire.algorithm not in ("auto", "tcp") or "CPU" not in devices.parameters:
        on_cpu = "CPU" in devices.parameters
        what, instead = (
            (f"all_reduce={wire.algorithm!r}", "all_reduce='tcp'") if on_cpu else ("GPUs", "tower_device='cpu'")
        )
        raise UserError(
            f"{what} with towers of several devices on a ring: their devices exchange gradients over TCP; use "
            f"{instead}, or towers of one device"
        )
    ((axis, own),) = given.items()
    return _TOWERS[axis](task, devices, options, own)


def kind_of(towers: GroupedTowers | None) -> str:
    """A worker's towers as a grid without 'data'; workers with different grids can't train together."""
    if towers is None:
        return "none"
    return f"{towers.axis}:{len(towers.devices.groups[0])}"


def decided_by_first(host: HostExchange) -> Decided:
    """A `Decided`: the first worker computes the numbers, and all others get them from it."""

    def decided(decide):
        # The others wait, so that they don't disturb a measurement on the same machine.
        own = list(decide()) if host.rank == 0 else []
        (count,) = host.gather("number of numbers", [len(own)])[0]
        found = host.gather("numbers", own if own else [0.0] * int(count))
        return [int(number) for number in found[0]]

    return decided
