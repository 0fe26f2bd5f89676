"""The strategy 'branches': the branches of a model's blocks are on different devices of a tower."""

from collections.abc import Mapping

import tensorflow as tf

from strategies.grouped_towers import (
    GroupedStrategy,
    check_grouped,
    decided_here,
    towers_of_several,
    traced_passes,
)
from towers.branches.branch_report import plan_lines, plan_table
from towers.branches.branched_once import BranchedOnce
from towers.branches.options import BranchOptions
from towers.branches.plan import BranchPlan, plan_of
from towers.devices import Devices
from towers.engine import Engine
from towers.gathering.exchange import UnitExchange
from towers.grid import BRANCH, Grid
from towers.options import StepOptions
from towers.parameters.placement import canonical_names
from towers.parameters.shards import Shard
from towers.split import even_shares, fewest_examples
from towers.task import Task
from towers.tower import EvaluationFunction, TowerFunction


class BranchedTowers:
    """Implements `strategies.grouped_towers.GroupedTowers`: each device of a tower has branches.

    Attributes:
      options: the options of branches.
      plan: which device computes each branch; set once the model is divided.
    """

    name = "branches"
    axis = BRANCH
    microbatches = None
    plan: BranchPlan

    def __init__(self, task: Task, devices: Devices, options: StepOptions, branches: BranchOptions | None):
        """Args:
        task, options: what is trained, and how.
        devices: its groups are the towers; without groups, all devices are one tower.
        branches: what balances the devices; None for the defaults.

        Raises:
          UserError: towers have one device each, or an option is not supported for such towers.
        """
        self.devices = towers_of_several(devices, self.name, self.axis)
        self._task, self._step, self.options = task, options, branches or BranchOptions()
        self._shares = even_shares(self.devices.num_towers)
        check_grouped(options)

    def check(self, shares):
        self._shares = shares

    def divide(self, model, decided=decided_here):
        num_examples = fewest_examples(self._task.batch_size, self._step.accumulation, self._shares)
        with tf.device(self.devices.groups[0][0]):
            self.plan = plan_of(
                model,
                len(self.devices.groups[0]),
                self.options,
                num_examples=num_examples,
                kernels=self._step.kernels(self.devices, num_examples),
                decided=decided,
            )

    def shards(self, variables):
        names, homes = canonical_names(variables.parameters), self.plan.devices_of(variables.parameters)
        return [Shard(name, home) for name, home in zip(names, homes, strict=True)]

    def make_towers(self, engine: Engine, exchange: UnitExchange | None = None):
        kernels, shared, model = engine.kernels, engine.tower.exchange, engine.tower.model
        parameter_devices = self.plan.devices_of(engine.tower.variables.parameters)
        num_devices = len(self.devices.groups[0])
        keys = [shared.new_group_key() for _ in range(num_devices)] if shared else ()
        towers, evaluations = [], []
        for group, *made in traced_passes(self.devices, exchange):
            own = shared and shared.again()
            training, evaluating = (
                BranchedOnce(self.plan, group, parameter_devices, keys, once=once) for once in made
            )
            towers.append(
                TowerFunction(
                    self._task,
                    model,
                    exchange=own,
                    kernels=kernels,
                    traced=training,
                    recompute=self._step.recompute,
                    batch_spec=engine.batch_spec,
                )
            )
            evaluations.append(
                EvaluationFunction(self._task, model, kernels=engine.evaluation_kernels, traced=evaluating)
            )
        return towers, evaluations

    @property
    def notices(self) -> list[str]:
        return plan_lines(self.plan, self.devices.groups[0])

    @property
    def layout_table(self) -> str:
        """A table with a line for each branch: its block, device and cost."""
        return plan_table(self.plan, self.devices.groups[0])

    @property
    def settings(self) -> Mapping[str, object]:
        grid = Grid(data=self.devices.num_towers, branch=len(self.devices.groups[0]))
        return {"grid": str(grid), "balance": self.options.balance}


def branches_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    branches: BranchOptions | None = None,
) -> GroupedStrategy:
    """Builds the strategy 'branches'.

    Args:
      task, options, shares: as for `strategies.registry.build_strategy`.
      devices: `devices.groups` are the devices of each tower; without groups, all devices are one tower.
      branches: what balances the devices; None for the defaults.

    Raises:
      UserError: towers have one device each, the model has fewer branches than a tower has devices, or an option
        is not supported for such towers.
    """
    towers = BranchedTowers(task, devices, options, branches)
    return GroupedStrategy(task, options, towers, shares=shares)
