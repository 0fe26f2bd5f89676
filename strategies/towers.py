"""Towers on the devices of this process, parameters on one of them."""

from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.options import StepOptions
from towers.task import Task
from towers.towers_engine import TowersEngine


def towers_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares: tuple[float, ...] | None = None
) -> SynchronousStrategy:
    """The strategy 'towers'.

    Raises:
      UserError: shares that don't match the towers, or a batch too small for all of them.
    """

    def make_engine(model, batch_spec):
        return TowersEngine(task, model, devices, options, batch_spec=batch_spec, shares=shares)

    return SynchronousStrategy("towers", task, options, make_engine, devices.num_towers)
