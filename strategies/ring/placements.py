"""Where our own engine has the parameters of a ring, and their optimizer state: on every worker, or on owners."""

from collections.abc import Callable

import tensorflow as tf

from strategies.ring.collectives import WorkerExchange
from strategies.ring.owners import EveryWorker
from strategies.ring.spread_placement import SpreadPlacement
from towers.devices import Devices
from towers.placement import CentralPlacement, Placement
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


def ring_placement(
    devices: Devices, exchange: WorkerExchange
) -> Callable[[ModelVariables, UpdateRule], Placement]:
    """What makes the placement of a model's variables on this worker, as `devices.zero` says."""

    def on_every_worker(variables: ModelVariables, rule: UpdateRule) -> CentralPlacement:
        shapes = [tf.TensorShape(variable.shape) for variable in variables.parameters]
        return CentralPlacement.of(variables, rule, devices.parameters, EveryWorker(exchange, shapes))

    def on_owners(variables: ModelVariables, rule: UpdateRule) -> SpreadPlacement:
        return SpreadPlacement(
            variables, rule, devices.parameters, exchange=exchange, each_microbatch=devices.zero == 2
        )

    return on_owners if devices.zero else on_every_worker
