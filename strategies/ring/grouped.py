r"""Towers of several devices on the workers of a ring: each worker's tower is a pipeline, or layers in slices.

    worker 0    stage 0 on CPU:0 --+      stage 1 on CPU:1 --+      sums over microbatches and own towers
    worker 1    stage 0 on CPU:0 --+      stage 1 on CPU:1 --+      then over the workers, stage by stage

Every worker divides the model alike, so each device exchanges with its counterparts.
"""

from strategies.grouped_towers import Decided, GroupedTowers
from strategies.pipeline import StagedTowers
from strategies.ring.collectives import HostExchange, WireOptions
from strategies.slices import SlicedTowers, SliceOptions
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.task import Task


def grouped_towers_of(
    task: Task,
    devices: Devices,
    options: StepOptions,
    wire: WireOptions,
    *,
    pipeline: PipelineOptions | None = None,
    slices: SliceOptions | None = None,
) -> GroupedTowers | None:
    """The towers of this worker; None if each is one device.

    Args:
      task, devices, options: as for every strategy.
      wire: how the workers exchange gradients.
      pipeline: stages and schedule of towers that are pipelines.
      slices: how towers divide layers.

    Raises:
      UserError: options that don't fit such towers, or groups of devices for which neither is given.
    """
    if pipeline is None and slices is None:
        if devices.groups:
            raise UserError(
                "towers of several devices with strategy 'ring': pass pipeline= if these are stages, or slices= "
                "if they divide layers"
            )
        return None
    if pipeline is not None and slices is not None:
        raise UserError("pipeline= and slices= with strategy 'ring': a tower has stages or slices; omit one")
    if devices.spread:
        raise UserError(
            f"{devices.spread} with towers of several devices on a ring: ZeRO over workers needs towers of one "
            "device; omit it, or use strategy 'pipeline' or 'slices' in one process"
        )
    if wire.algorithm not in ("auto", "tcp") or "CPU" not in devices.parameters:
        what = f"all_reduce={wire.algorithm!r}" if "CPU" in devices.parameters else "parameters on a GPU"
        raise UserError(
            f"{what} with towers of several devices on a ring: their devices exchange gradients over TCP; use "
            "all_reduce='tcp' and parameter_device='cpu'"
        )
    if pipeline is not None:
        return StagedTowers(task, devices, options, pipeline)
    return SlicedTowers(task, devices, options, slices)


def kind_of(towers: GroupedTowers | None) -> str:
    """What a worker's towers are, as a grid without 'data'; workers with other towers can't train together."""
    if towers is None:
        return "none"
    axis = "stage" if towers.name == StagedTowers.name else "slice"
    return f"{axis}:{len(towers.devices.groups[0])}"


def decided_by_first(host: HostExchange) -> Decided:
    """Numbers that the first worker decides, and all others take from it."""

    def decided(decide):
        # The others wait, so that they don't disturb a measurement on the same machine.
        own = list(decide()) if host.rank == 0 else []
        (count,) = host.gather("number of numbers", [len(own)])[0]
        found = host.gather("numbers", own if own else [0.0] * int(count))
        return [int(number) for number in found[0]]

    return decided
