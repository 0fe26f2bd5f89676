"""The strategy 'branches': the branches of a model's blocks are on different devices of a tower."""

import tensorflow as tf

from strategies.grouped_towers import check_grouped
from strategies.synchronous import SynchronousStrategy
from towers.branches.branch_report import plan_lines, plan_table
from towers.branches.branched_once import BranchedOnce
from towers.branches.options import BranchOptions
from towers.branches.plan import BranchPlan, plan_of
from towers.devices import Devices
from towers.errors import UserError
from towers.exchange import TowerExchange
from towers.grid import Grid
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.placement import canonical_names
from towers.sharded_placement import ShardedPlacement
from towers.shards import Shard
from towers.task import Task
from towers.tower import EvaluationFunction, TowerFunction


class BranchedTowers(SynchronousStrategy):
    """Implements `strategies.contract.Strategy`: `devices.groups` are the devices of each tower.

    Attributes:
      plan: which device computes each branch.
    """

    plan: BranchPlan

    def __init__(self, task: Task, devices: Devices, options: StepOptions, shares, branches: BranchOptions):
        self._devices, self._shares, self._branches = devices, shares, branches
        super().__init__("branches", task, options, self._make_engine, devices.num_towers)

    def _make_engine(self, model, batch_spec):
        owners = self._devices.groups[0]
        num_passes = self.options.accumulation * self._devices.num_towers
        with tf.device(owners[0]):
            self.plan = plan_of(
                model,
                len(owners),
                self._branches,
                num_examples=max(1, self.task.batch_size // num_passes),
                kernels=self.options.kernels(self._devices),
            )

        def place(variables, rule):
            names, homes = canonical_names(variables.parameters), self.plan.devices_of(variables.parameters)
            shards = [Shard(name, home) for name, home in zip(names, homes, strict=True)]
            return ShardedPlacement(variables, rule, owners, shards)

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
        kernels, shared, model = self.options.kernels(self._devices), engine.tower.exchange, engine.tower.model
        parameter_devices = self.plan.devices_of(engine.tower.variables.parameters)
        num_devices = len(self._devices.groups[0])
        keys = [TowerExchange(shared.num_towers).group_key for _ in range(num_devices)] if shared else ()
        towers, evaluations = [], []
        for group in self._devices.groups:
            # Each tower is traced by itself: its exchanges count from 1, as those of its counterparts do.
            own = shared and TowerExchange(shared.num_towers, shared.group_key)
            traced = BranchedOnce(self.plan, group, parameter_devices, keys)
            towers.append(TowerFunction(self.task, model, exchange=own, kernels=kernels, traced=traced))
            evaluations.append(EvaluationFunction(self.task, model, kernels=kernels, traced=traced))
        return towers, evaluations

    @property
    def notices(self):
        return [*plan_lines(self.plan, self._devices.groups[0]), *super().notices]

    @property
    def layout_table(self) -> str:
        """A line for each branch: its block, its device and what it costs."""
        return plan_table(self.plan, self._devices.groups[0])

    def mode_settings(self):
        grid = Grid(data=self._devices.num_towers, branch=len(self._devices.groups[0]))
        return {"grid": str(grid), "balance": self._branches.balance}


def branches_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    branches: BranchOptions | None = None,
) -> BranchedTowers:
    """Builds the strategy 'branches'.

    Args:
      task, options, shares: as for `strategies.registry.build_strategy`.
      devices: `devices.groups` are the devices of each tower; without groups, all devices are one tower.
      branches: what balances the devices; None for the defaults.

    Raises:
      UserError: towers of one device, a model without branches or with fewer than devices, or an option that such
        towers don't have.
    """
    devices = devices if devices.groups else devices.grouped((devices.towers,))
    if len(devices.groups[0]) < 2:
        raise UserError(
            "strategy 'branches' with 1 device a tower: nothing is divided; use at least 2, as with "
            "grid='branch:2', or strategy 'towers'"
        )
    check_grouped("branches", options)
    return BranchedTowers(task, devices, options, shares, branches or BranchOptions())
