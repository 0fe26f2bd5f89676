"""A worker's towers of one device that gather their parameters from all workers: one graph for all of them."""

import functools

from strategies.ring.zero.worker_units import WorkerUnits
from towers.devices import Devices
from towers.gathering.gathered_once import GatheredOnce


def gathered_towers(devices: Devices, units: WorkerUnits) -> dict:
    """The arguments `traced` and `make_towers` of an engine whose towers gather parameters by `units`."""
    first, *others = [(device,) for device in devices.towers]
    return {
        "traced": functools.partial(GatheredOnce, exchange=units, devices=first, others=others),
        "make_towers": lambda engine: (engine.towers[:1], engine.evaluations[:1]),
    }
