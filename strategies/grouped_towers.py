"""Towers of several devices: what an engine needs of them, and the strategies that train them in one process.

    data:2,stage:2     groups        devices      each tower
    tower 0            CPU:0 CPU:1                two stages, slices of layers, or branches
    tower 1            CPU:2 CPU:3

The same towers train in one process (`GroupedStrategy`) and on each worker of a ring (`strategies.ring.grouped`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import keras

from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.engine import Engine
from towers.errors import UserError
from towers.gathering.exchange import UnitExchange
from towers.gathering.gathered_once import GatheredOnce
from towers.grid import BRANCH, SLICE, STAGE
from towers.input.tower_parts import TowerParts
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.parameters.placement import Placement
from towers.parameters.sharded_groups import ShardedGroups
from towers.parameters.sharded_placement import ShardedPlacement
from towers.parameters.shards import Shard
from towers.parameters.zero_of_groups import ZeroOfGroups
from towers.task import Task
from towers.tower import ModelVariables
from towers.tracing.copied_graphs import CopiedGraphs
from towers.tracing.traced_once import TracedOnce
from towers.updates.rules import UpdateRule

# The arguments with the options of such towers, by axis of `towers.grid`: what each device of a tower has.
OPTIONS_BY_AXIS = MappingProxyType({STAGE: "pipeline", SLICE: "slices", BRANCH: "branches"})

# Given a function that computes some numbers, returns those of the process that decides for all.
Decided = Callable[[Callable[[], Sequence[int]]], Sequence[int]]


def decided_here(decide: Callable[[], Sequence[int]]) -> Sequence[int]:
    """Implements `Decided` for a run of one process."""
    return decide()


class GroupedTowers(Protocol):
    """The towers of one process, each of several devices.

    Attributes:
      name: what the towers are made of, as a strategy's name: 'pipeline', 'slices' or 'branches'.
      axis: axis of `towers.grid`: what each device of a tower has.
      options: how the towers divide the model; the same in all processes.
      devices: devices with groups.
      microbatches: number of microbatches that a tower computes in one call; None for towers that get a batch.
    """

    name: str
    axis: str
    options: object
    devices: Devices
    microbatches: int | None

    def check(self, shares: tuple[float, ...]) -> None:
        """Checks what depends on the towers of all processes.

        Args:
          shares: shares of all towers.

        Raises:
          UserError: the towers can't divide a batch by these shares.
        """

    def divide(self, model: keras.Model, decided: Decided = decided_here) -> None:
        """Divides the model over the devices of a tower. Call it once, before the methods below.

        Args:
          model: a built template.
          decided: distributes one process's measurement, so that all processes divide the model alike.

        Raises:
          UserError: the model can't be divided in this way.
        """

    def shards(self, variables: ModelVariables) -> list[Shard]:
        """All parameters, or slices of them, in order; the owner of each is the index of a device in its tower."""

    def make_towers(
        self, engine: Engine, exchange: UnitExchange | None = None
    ) -> tuple[Sequence[Callable], Sequence[Callable]]:
        """The training passes and the evaluation passes of the towers of an engine.

        Args:
          engine: the engine that gets the towers.
          exchange: exchange between the processes that own the parameters; None if this process owns all. With an
            exchange, a single pass of each kind computes all towers.
        """

    @property
    def notices(self) -> list[str]:
        """Lines for the user about how the model is divided."""

    @property
    def settings(self) -> Mapping[str, object]:
        """The options of these towers by name, known before the model is divided."""


class GroupedStrategy(SynchronousStrategy):
    """Implements `strategies.contract.Strategy`: towers of several devices in one process."""

    def __init__(
        self, task: Task, options: StepOptions, towers: GroupedTowers, *, shares: tuple[float, ...] | None = None
    ):
        """Args:
        task, options: what is trained, and how.
        towers: divides the model.
        shares: relative sizes of the towers' parts of a batch; None for equal parts.
        """
        self._towers = towers
        _check_zero(towers)

        def place(variables: ModelVariables, rule: UpdateRule) -> Placement:
            return _placed(towers.devices, variables, rule, towers.shards(variables))

        def make_engine(model, batch_spec):
            towers.divide(model)
            return OneProcessEngine(
                task,
                model,
                towers.devices,
                options,
                batch_spec=batch_spec,
                parts=TowerParts.of_one_process(towers.devices.num_towers, shares),
                place=place,
                make_towers=towers.make_towers,
                microbatches=towers.microbatches,
            )

        own = towers.devices
        super().__init__(towers.name, task, options, make_engine, own.num_towers, unprepared=own.input_on_towers)

    @property
    def microbatches(self) -> int:
        return self.options.accumulation * (self._towers.microbatches or 1)

    @property
    def notices(self) -> list[str]:
        return [*self._towers.notices, *super().notices]

    @property
    def layout_table(self) -> str:
        """The towers' `layout_table`, which towers of slices and of branches have."""
        return self._towers.layout_table

    def mode_settings(self) -> Mapping[str, object]:
        return self._towers.settings


def towers_of_several(devices: Devices, name: str, axis: str) -> Devices:
    """The devices in groups, one for each tower; devices without groups become one tower.

    Args:
      devices: devices of this process.
      name: the strategy's name.
      axis: axis of `towers.grid`: what each device of a tower has.

    Raises:
      UserError: towers have one device each.
    """
    found = devices if devices.groups else devices.grouped((devices.towers,))
    if len(found.groups[0]) < 2:
        raise UserError(
            f"strategy {name!r} with 1 device a tower: nothing is divided; use at least 2, as with "
            f"grid='{axis}:2', or strategy 'towers'"
        )
    return found


def traced_towers(
    devices: Devices, exchange: UnitExchange | None
) -> Iterator[tuple[Sequence[str], dict[str, object], dict[str, object]]]:
    """Yields (devices, training arguments, evaluation arguments of `GatheredOnce`) for each tower to trace.

    All towers compute the same, so only the first tower's functions are traced.

    Args:
      devices: devices with groups.
      exchange: as for `GroupedTowers.make_towers`. With an exchange, the first tower's graphs contain the other
        towers.
    """
    groups = devices.groups
    if exchange is not None:
        first, *others = groups
        gathering = {"exchange": exchange, "others": others}
        yield first, gathering, gathering
        return
    training, evaluating = CopiedGraphs(groups), CopiedGraphs(groups)
    for tower, group in enumerate(groups):
        copied = [{"graph": functools.partial(graphs.of, tower)} for graphs in (training, evaluating)]
        yield group, *(copied if len(groups) > 1 else ({}, {}))


def traced_passes(
    devices: Devices, exchange: UnitExchange | None
) -> Iterator[tuple[Sequence[str], Callable, Callable]]:
    """Yields (devices, maker of the training graph, of the evaluation graph) for each tower to trace.

    The makers are `TracedOnce`, or with ZeRO-3 `GatheredOnce`.

    Args:
      devices, exchange: as for `traced_towers`.
    """
    for group, *kinds in traced_towers(devices, exchange):
        once = functools.partial(GatheredOnce, devices=group) if devices.zero == 3 else TracedOnce
        yield group, *(functools.partial(once, **options) for options in kinds)


def check_grouped(options: StepOptions) -> None:
    """Raises UserError for an option that towers of several devices do not support."""
    if options.xla:
        raise UserError("xla=True with towers of several devices: XLA compiles a tower on one device; omit xla")


def _placed(devices: Devices, variables: ModelVariables, rule: UpdateRule, shards: Sequence[Shard]) -> Placement:
    """The placement of the variables of one process's towers; `shards` as from `GroupedTowers.shards`."""
    if devices.zero == 3:
        return ShardedGroups(variables, rule, devices.groups, shards)
    if devices.zero:
        return ZeroOfGroups(variables, rule, devices.groups, shards, meet_late=devices.zero == 1)
    return ShardedPlacement(variables, rule, devices.groups[0], shards)


def _check_zero(towers: GroupedTowers) -> None:
    zero, axis = towers.devices.zero, towers.axis
    if zero and len(towers.devices.groups) == 1:
        raise UserError(
            f"zero={zero} with strategy {towers.name!r} and 1 tower: ZeRO divides optimizer state between towers; "
            f"omit zero, or use more, as grid='data:2,{axis}:2'"
        )
