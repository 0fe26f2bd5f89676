"""The strategy 'towers': towers on the devices of one process, parameters on one of these or on all."""

from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.gathering.gathered_once import GatheredOnce
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.task import Task
from towers.traced_once import TracedOnce


def towers_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares: tuple[float, ...] | None = None
) -> SynchronousStrategy:
    """Builds the strategy 'towers'; arguments as `strategies.registry.build_strategy`.

    Raises:
      UserError: shares that don't match the towers, or a batch too small for all towers.
    """

    def make_engine(model, batch_spec):
        return OneProcessEngine(
            task,
            model,
            devices,
            options,
            batch_spec=batch_spec,
            shares=shares,
            traced=GatheredOnce if devices.zero == 3 else TracedOnce,
        )

    return SynchronousStrategy("towers", task, options, make_engine, devices.num_towers)
