"""The strategies by name. To add one: write its file, add its row."""

import dataclasses
import difflib
from collections.abc import Callable

from strategies.branches import branches_strategy
from strategies.contract import Strategy
from strategies.distribute.mirrored import mirrored_strategy
from strategies.grouped_towers import OPTIONS_BY_AXIS
from strategies.parameter_servers import servers_strategy
from strategies.pipeline import pipeline_strategy
from strategies.ring.exchange.joining import Ring
from strategies.ring.strategy import ring_strategy
from strategies.servers.membership import ServersMembership
from strategies.slices import SliceOptions, slices_strategy
from strategies.towers import towers_strategy
from towers.branches.options import BranchOptions
from towers.devices import Devices
from towers.errors import UserError, check_kind, either, use_one
from towers.grid import BRANCH, SLICE, STAGE
from towers.options import StepOptions, check_step_options
from towers.stages.options import PipelineOptions
from towers.task import Task, check_task

# `divides` of a mode whose towers are single devices unless the caller chooses another division.
ON_REQUEST = "on request"


@dataclasses.dataclass(frozen=True)
class _Mode:
    """How to build a strategy.

    Attributes:
      build: function of (task, devices, options, shares=...). A strategy of several processes also takes this
        process's membership, as the argument that `cluster_kind` names.
      cluster_kind: 'ring' or 'servers': the kind of cluster that its processes form; '' for a single process.
      spreads: prefixes of the supported arguments, as written by `towers.devices.spread_by`, that put parameters
        or slots elsewhere than on one device of each process.
      divides: what each device of a tower has: STAGE, SLICE or BRANCH of `towers.grid`; ON_REQUEST for any of
        these, or none; '' if a tower is one device. `build` takes the arguments in `OPTIONS_BY_AXIS` for it.
      exchanges_statistics: whether the towers of a process exchange synced batch statistics.
      repeats: whether one execution of a graph can have several steps.
      has_parameter_device: whether towers of one device each leave a choice where the parameters are.
    """

    build: Callable[..., Strategy]
    cluster_kind: str = ""
    spreads: tuple[str, ...] = ()
    divides: str = ""
    exchanges_statistics: bool = False
    repeats: bool = False
    has_parameter_device: bool = True

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `build_strategy` that this mode takes but not every mode."""
        of_towers = [name for axis, name in OPTIONS_BY_AXIS.items() if self.divides in (axis, ON_REQUEST)]
        repeated = ["steps_per_execution"] if self.repeats else []
        return (*of_towers, *([self.cluster_kind] if self.cluster_kind else []), *repeated)


_MODES = {
    "towers": _Mode(
        towers_strategy,
        spreads=("parameter_device=", "zero=", "offload="),
        exchanges_statistics=True,
        repeats=True,
    ),
    "mirrored": _Mode(mirrored_strategy, has_parameter_device=False),
    "ring": _Mode(
        ring_strategy, cluster_kind="ring", spreads=("zero=",), divides=ON_REQUEST, exchanges_statistics=True
    ),
    "ps": _Mode(servers_strategy, cluster_kind="servers"),
    "pipeline": _Mode(pipeline_strategy, divides=STAGE, spreads=("zero=",)),
    "slices": _Mode(slices_strategy, divides=SLICE, spreads=("zero=",)),
    "branches": _Mode(branches_strategy, divides=BRANCH, spreads=("zero=",)),
}

# The types of the arguments of `build_strategy` that not every mode takes.
_KINDS = {
    "ring": Ring,
    "servers": ServersMembership,
    "pipeline": PipelineOptions,
    "slices": SliceOptions,
    "branches": BranchOptions,
}


def strategy_names() -> tuple[str, ...]:
    """Names that `build_strategy` accepts."""
    return tuple(_MODES)


def cluster_kind(name: str) -> str:
    """Kind of cluster that the strategy's processes form: 'ring', 'servers', or '' for a single process.

    Raises:
      UserError: unknown name.
    """
    return _mode(name).cluster_kind


def exchanges_statistics(name: str) -> bool:
    """Whether the towers of a process wait for each other in each batch norm with synced statistics.

    Raises:
      UserError: unknown name.
    """
    return _mode(name).exchanges_statistics


def has_parameter_device(name: str) -> bool:
    """Whether the strategy, if its towers are single devices, uses the device that is chosen for the parameters.

    Raises:
      UserError: unknown name.
    """
    return _mode(name).has_parameter_device


def build_strategy(
    name: str,
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    ring: Ring | None = None,
    servers: ServersMembership | None = None,
    pipeline: PipelineOptions | None = None,
    slices: SliceOptions | None = None,
    branches: BranchOptions | None = None,
    steps_per_execution: int | None = None,
) -> Strategy:
    """A strategy at step 0, with initial weights drawn from the options' seed.

    Args:
      name: one of `strategy_names()`.
      task: what to train.
      devices: devices of this process.
      options: how a step computes.
      shares: relative part of this process's examples for each of its towers; None: equal parts.
      ring: this process's membership of a ring; None: a ring of one process.
      servers: the chief's membership of a parameter-server cluster; required by 'ps'.
      pipeline: stages and schedule of 'pipeline'; None: the defaults. For 'ring': makes each tower a pipeline.
      slices: how 'slices' divides layers; None: the defaults. For 'ring': makes each tower divide its layers.
      branches: how 'branches' assigns branches to devices; None: the defaults. For 'ring': makes each tower divide
        its branches.
      steps_per_execution: for 'towers': number of steps in one execution of a graph, as Keras's argument. None: on
        CPUs up to 256, after 2,000 steps of at most 4 ms each; otherwise 1. Numbers don't depend on it.

    Raises:
      UserError: the name is unknown, a strategy that needs a cluster has none, an argument has another type or is
        for other strategies, or the strategy refuses it.
    """
    mode = _mode(name)
    check_task(task)
    check_kind("devices", devices, Devices, "pass what towers.device_setup.configure_devices() returns")
    check_step_options(options)
    given = {"ring": ring, "servers": servers, "pipeline": pipeline, "slices": slices, "branches": branches}
    for argument, value in given.items():
        if value is not None:
            kind = _KINDS[argument]
            check_kind(argument, value, kind, f"pass a {kind.__name__}(...), or omit it")
            _check_taken(name, argument)
    if steps_per_execution is not None:
        _check_taken(name, "steps_per_execution")
    given["steps_per_execution"] = steps_per_execution
    check_spread(name, devices.spread)
    check_groups(name, bool(devices.groups))
    if mode.cluster_kind == "servers" and servers is None:
        raise UserError(
            f"strategy {name!r} needs several processes: a chief, workers and parameter servers; "
            "start them all and pass this one's membership as servers, or use another strategy"
        )
    if shares is None and mode.divides not in (SLICE, BRANCH):
        membership = given.get(mode.cluster_kind)
        own = task.batch_size if membership is None else membership.own_examples(task.batch_size)
        devices = devices.for_examples(own // options.accumulation)
    return mode.build(
        task, devices, options, shares=shares, **{argument: given[argument] for argument in mode.arguments}
    )


def _check_taken(name: str, argument: str) -> None:
    """Raises UserError if the strategy does not take this argument."""
    if argument not in _mode(name).arguments:
        able = [repr(other) for other, mode in _MODES.items() if argument in mode.arguments]
        raise UserError(
            f"{argument}=... with strategy {name!r}: only {either(able)} can; {use_one(able)}, or omit {argument}"
        )


def check_spread(name: str, argument: str) -> None:
    """Raises UserError if the strategy can't have its parameters or slots on the towers' devices.

    Args:
      name: the strategy's name.
      argument: the argument that requires it, from `towers.devices.spread_by`; '' for none.
    """
    if argument and not argument.startswith(_mode(name).spreads):
        able = [repr(other) for other, mode in _MODES.items() if argument.startswith(mode.spreads)]
        raise UserError(
            f"{argument} with strategy {name!r}: only {either(able)} can; {use_one(able)}, or omit "
            f"{argument.partition('=')[0]}"
        )


def divides(name: str) -> str:
    """What each device of a tower of the strategy has: STAGE, SLICE or BRANCH of `towers.grid`, or ON_REQUEST.

    '' if its towers are single devices.

    Raises:
      UserError: unknown name.
    """
    return _mode(name).divides


def check_groups(name: str, grouped: bool, grid: str = "a grid") -> None:
    """Raises UserError if towers are groups of devices and the strategy has towers of one device.

    Args:
      name: the strategy's name.
      grouped: whether towers are groups of devices.
      grid: the argument that made the groups, for the message.
    """
    if grouped and not _mode(name).divides:
        *first, last = [repr(other) for other, mode in _MODES.items() if mode.divides]
        able = f"{', '.join(first)} and {last}"
        raise UserError(
            f"{grid} with strategy {name!r}, whose towers are single devices: it is for {able}; use one of these, "
            "or omit the grid"
        )


def _mode(name: str) -> _Mode:
    if not isinstance(name, str) or name not in _MODES:
        near = difflib.get_close_matches(str(name), _MODES, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_MODES)}"
        raise UserError(f"strategy {name!r} is unknown: {hint}")
    return _MODES[name]
