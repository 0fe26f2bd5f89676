"""The strategy 'towers': towers on the devices of one process, parameters on one of these devices."""

from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.task import Task


def towers_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares: tuple[float, ...] | None = None
) -> SynchronousStrategy:
    """Builds the strategy 'towers'; arguments as `strategies.registry.build_strategy`.

    Raises:
      UserError: shares that don't match the towers, or a batch too small for all towers.
    """

    def make_engine(model, batch_spec):
        return OneProcessEngine(task, model, devices, options, batch_spec=batch_spec, shares=shares)

    return SynchronousStrategy("towers", task, options, make_engine, devices.num_towers)
