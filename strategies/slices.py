"""The strategy 'slices': layers are divided over a tower's devices, and the towers divide the batch."""

import dataclasses
from collections.abc import Mapping

from strategies.grouped_towers import (
    GroupedStrategy,
    check_grouped,
    decided_here,
    towers_of_several,
    traced_passes,
)
from towers.devices import Devices
from towers.engine import Engine
from towers.errors import UserError
from towers.gathering.exchange import UnitExchange
from towers.grid import SLICE
from towers.options import StepOptions
from towers.slices.layout import Layout
from towers.slices.layout_report import large_whole_notices, layout_table
from towers.slices.sliced_tower import SlicedEvaluation, SlicedTower
from towers.task import Task
from towers.updates.composed_rules import check_elementwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """How layers are divided.

    Attributes:
      layout: pairs (pattern of layers' paths, split), as for `towers.slices.layout.Layout`.

    Raises:
      UserError: `layout` does not consist of such pairs.
    """

    layout: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        if not isinstance(self.layout, tuple | list) or not all(map(_is_rule, self.layout)):
            raise UserError(
                f"layout={self.layout!r}: must be pairs of a pattern of layers' paths and a split; use for "
                "example layout=(('block_*/mlp_up', 'columns'),)"
            )


def _is_rule(given) -> bool:
    return isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(part, str) for part in given)


class SlicedTowers:
    """Implements `strategies.grouped_towers.GroupedTowers`: each device of a tower has slices of the layers.

    Attributes:
      options: how layers are divided.
      layout: how the layers are split; set once the model is divided.
    """

    name = "slices"
    axis = SLICE
    microbatches = None
    layout: Layout

    def __init__(self, task: Task, devices: Devices, options: StepOptions, slices: SliceOptions | None):
        """Args:
        task, options: what is trained, and how.
        devices: its groups are the towers; without groups, all devices are one tower.
        slices: how layers are divided; None for the defaults.

        Raises:
          UserError: towers have one device each, the update rule needs whole parameters, or `xla` is set.
        """
        self.devices = towers_of_several(devices, self.name, self.axis)
        self._task, self._step, self.options = task, options, slices or SliceOptions()
        check_elementwise(
            options.rule,
            "layers divided into slices: it needs whole parameters, and each device has slices of them",
            "use momentum or adamw, or another strategy or grid",
        )
        check_grouped(options)

    def check(self, shares):
        """Nothing to do: `Engine` checks the batch size."""

    def divide(self, model, decided=decided_here):
        self.layout = Layout(model, len(self.devices.groups[0]), self.options.layout)

    def shards(self, variables):
        return self.layout.shards()

    def make_towers(self, engine: Engine, exchange: UnitExchange | None = None):
        kernels, shared = engine.kernels, engine.tower.exchange
        towers, evaluations = [], []
        for group, training, evaluating in traced_passes(self.devices, exchange):
            own = shared and shared.again()
            towers.append(
                SlicedTower(
                    self._task,
                    engine.tower.model,
                    self.layout,
                    group,
                    exchange=own,
                    kernels=kernels,
                    recompute=self._step.recompute,
                    batch_spec=engine.batch_spec,
                    traced=training,
                )
            )
            evaluations.append(
                SlicedEvaluation(
                    self._task,
                    engine.tower.model,
                    self.layout,
                    group,
                    kernels=engine.evaluation_kernels,
                    traced=evaluating,
                )
            )
        return towers, evaluations

    @property
    def notices(self) -> list[str]:
        return large_whole_notices(self.layout)

    @property
    def layout_table(self) -> str:
        """A table with a line for each parameter: its split, devices and collective."""
        return layout_table(self.layout, self.devices.groups[0])

    @property
    def settings(self) -> Mapping[str, object]:
        return {"num_slices": len(self.devices.groups[0])}


def slices_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    slices: SliceOptions | None = None,
) -> GroupedStrategy:
    """Builds the strategy 'slices'.

    Args:
      task, options, shares: as for `strategies.registry.build_strategy`.
      devices: `devices.groups` are the devices of each tower; without groups, all devices are one tower.
      slices: how layers are divided; None for the defaults.

    Raises:
      UserError: towers have one device each, the update rule needs whole parameters, `xla` is set, or the layout
        does not fit the model.
    """
    return GroupedStrategy(task, options, SlicedTowers(task, devices, options, slices), shares=shares)
