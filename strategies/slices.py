"""The strategy 'slices': the layers of a tower are divided over its devices, towers divide the batch."""

import dataclasses

from strategies.grouped_towers import check_grouped
from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.errors import UserError
from towers.exchange import TowerExchange
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.sharded_placement import ShardedPlacement
from towers.slices.layout import Layout
from towers.slices.layout_report import large_whole_notices, layout_table
from towers.slices.sliced_tower import SlicedEvaluation, SlicedTower
from towers.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """How layers are divided.

    Attributes:
      layout: (pattern of layers' paths, split), as for `towers.slices.layout.Layout`.
    """

    layout: tuple[tuple[str, str], ...] = ()


class SlicesStrategy(SynchronousStrategy):
    """Implements `strategies.contract.Strategy`: `devices.groups` are the devices of each tower.

    Attributes:
      layout: how the layers are split.
    """

    def __init__(self, task: Task, devices: Devices, options: StepOptions, shares, slices: SliceOptions):
        self._slices, self._devices, self._shares = slices, devices, shares
        super().__init__("slices", task, options, self._make_engine, devices.num_towers)

    def _make_engine(self, model, batch_spec):
        owners = self._devices.groups[0]
        self.layout = Layout(model, len(owners), self._slices.layout)

        def place(variables, rule):
            return ShardedPlacement(variables, rule, owners, self.layout.shards())

        return OneProcessEngine(
            self.task,
            model,
            self._devices,
            self.options,
            batch_spec=batch_spec,
            shares=self._shares,
            place=place,
            make_towers=self._make_towers,
        )

    def _make_towers(self, engine):
        kernels = self.options.kernels(self._devices)
        shared = engine.tower.exchange
        towers, evaluations = [], []
        for group in self._devices.groups:
            # Each tower is traced by itself: its exchanges count from 1, as those of its counterparts do.
            own = shared and TowerExchange(shared.num_towers, shared.group_key)
            towers.append(
                SlicedTower(
                    self.task,
                    engine.tower.model,
                    self.layout,
                    group,
                    exchange=own,
                    kernels=kernels,
                    recompute=self.options.recompute,
                )
            )
            evaluations.append(
                SlicedEvaluation(self.task, engine.tower.model, self.layout, group, kernels=kernels)
            )
        return towers, evaluations

    @property
    def notices(self):
        return super().notices + large_whole_notices(self.layout)

    @property
    def layout_table(self) -> str:
        """A line for each parameter: its split, its devices and its collective."""
        return layout_table(self.layout, self._devices.groups[0])

    def mode_settings(self):
        return {"num_slices": len(self._devices.groups[0])}


def slices_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    slices: SliceOptions | None = None,
) -> SlicesStrategy:
    """Builds the strategy 'slices'.

    Args:
      task, options, shares: as for `strategies.registry.build_strategy`.
      devices: `devices.groups` are the devices of each tower; without groups, all devices are one tower.
      slices: how layers are divided; None for the defaults.

    Raises:
      UserError: towers of one device, an update rule that needs whole parameters, XLA, or a layout that does not
        fit the model.
    """
    devices = devices if devices.groups else devices.grouped((devices.towers,))
    if len(devices.groups[0]) < 2:
        raise UserError(
            "strategy 'slices' with 1 device a tower: nothing is divided; use at least 2, as with "
            "grid='slice:2', or strategy 'towers'"
        )
    if not options.rule.elementwise:
        raise UserError(
            f"strategy 'slices' with {type(options.rule).__name__}: it needs whole parameters, and each device "
            "updates its slices; use momentum or adamw, or another strategy"
        )
    check_grouped("slices", options)
    return SlicesStrategy(task, devices, options, shares, slices or SliceOptions())
