"""Where our own engine places the parameters of a ring, and their optimizer state.

Both on every worker; or parameters on every worker and optimizer state on owners; or both on owners; or on the
devices of each worker's towers.
"""

from collections.abc import Callable

import tensorflow as tf

from strategies.grouped_towers import GroupedTowers
from strategies.ring.exchange.collectives import WorkerExchange
from strategies.ring.owners import Counterparts, EveryWorker
from strategies.ring.zero.gathered_placement import GatheredPlacement
from strategies.ring.zero.worker_units import WorkerUnits
from strategies.ring.zero.zero_of_groups import SpreadGroups
from strategies.ring.zero.zero_placement import SpreadPlacement
from towers.devices import Devices
from towers.parameters.placement import CentralPlacement, Placement
from towers.parameters.sharded_placement import ShardedPlacement
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


def ring_placement(
    devices: Devices,
    exchange: WorkerExchange,
    towers: GroupedTowers | None = None,
    units: WorkerUnits | None = None,
) -> Callable[[ModelVariables, UpdateRule], Placement]:
    """A function that makes the placement of a model's variables on this worker.

    Args:
      devices: `devices.zero` says whether optimizer state has owners.
      exchange: exchanges between the workers.
      towers: this worker's towers, if each is several devices.
      units: exchanges the parameters, if each worker holds only its own parts.
    """

    def on_every_worker(variables: ModelVariables, rule: UpdateRule) -> CentralPlacement:
        shapes = [tf.TensorShape(variable.shape) for variable in variables.parameters]
        return CentralPlacement.of(variables, rule, devices.parameters, EveryWorker(exchange, shapes))

    def on_owners(variables: ModelVariables, rule: UpdateRule) -> SpreadPlacement:
        return SpreadPlacement(
            variables, rule, devices.parameters, exchange=exchange, each_microbatch=devices.zero == 2
        )

    def in_parts(variables: ModelVariables, rule: UpdateRule) -> GatheredPlacement:
        return GatheredPlacement(variables, rule, [devices.parameters], units)

    def on_devices(variables: ModelVariables, rule: UpdateRule) -> Placement:
        own = towers.devices.groups[0]
        if units is not None:
            return GatheredPlacement(variables, rule, own, units)
        shards = towers.shards(variables)
        if devices.zero:
            return SpreadGroups(variables, rule, own, shards, exchange=exchange, each_microbatch=devices.zero == 2)
        placement = ShardedPlacement(variables, rule, own, shards)
        placement.owners = Counterparts(**vars(placement.owners), exchange=exchange)
        return placement

    if towers is not None:
        return on_devices
    if units is not None:
        return in_parts
    return on_owners if devices.zero else on_every_worker
