"""Chooses the engine that computes a ring worker's steps, and builds it for the worker's towers."""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import tensorflow as tf

from strategies.distribute.mirrored import mirrored, num_gpus
from strategies.distribute.replicated_engine import ReplicatedEngine
from strategies.distribute.replicated_placement import check_sent
from strategies.engines import EngineChoice, choose_engine
from strategies.grouped_towers import GroupedTowers
from strategies.ring.engine import RingEngine
from strategies.ring.exchange.collectives import HostExchange, WorkerExchange
from strategies.ring.exchange.joining import Ring
from strategies.ring.grouped import decided_by_first
from strategies.ring.placements import ring_placement
from strategies.ring.zero.gathered_towers import gathered_towers
from strategies.ring.zero.worker_units import WorkerUnits
from towers.devices import HOST, Devices
from towers.engine import Engine
from towers.exchange import TowerExchange
from towers.input.tower_parts import TowerParts
from towers.options import StepOptions
from towers.parameters.placement import free_templates
from towers.task import Batch, Task
from towers.tower import ModelVariables

TENSORFLOWS_CARRIER = "MultiWorkerMirroredStrategy"
# Greater than the keys of the workers' groups, which count from 2,000,000.
_FIRST_TOWERS_GROUP_KEY = 3_000_000


def choose_ring_engine(
    ring: Ring, host: HostExchange, devices: Devices, towers: GroupedTowers | None
) -> EngineChoice:
    """Chooses the engine, the same on all workers.

    Args:
      ring: the workers, and the engine that the user wants.
      host: compares the workers' devices.
      devices: devices of this worker.
      towers: this worker's towers, if each is several devices.

    Raises:
      UserError: the user chose TensorFlow's engine, which does not support the other options.
    """
    counts = host.gather("replicas", [num_gpus(devices)], np.int64)
    needs_own = ["all_reduce=tcp"] if ring.options.wire.algorithm == "tcp" else []
    if devices.zero:
        needs_own.append(f"zero={devices.zero}")
    elif towers is None and not _is_served(devices):
        needs_own.append(f"parameter_device={devices.settings['parameter_device']}")
    if towers is not None:
        needs_own.append(f"towers of {len(towers.devices.groups[0])} devices")
    if len(set(np.ravel(counts))) > 1:
        needs_own.append(f"workers with {', '.join(map(str, np.ravel(counts)))} GPUs")
    return choose_engine(ring.options.engine, needs_own, TENSORFLOWS_CARRIER)


def _is_served(devices: Devices) -> bool:
    """Whether TensorFlow's engine, whose replicas have the parameters, serves this parameter device.

    The host is also the default; the device of a worker's only tower is that of its replica.
    """
    return devices.parameters == HOST or devices.towers == (devices.parameters,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOfWorker:
    """Builds the engine of one worker.

    Attributes:
      ring: the workers.
      host: exchanges between the workers' hosts.
      exchange: exchanges between the workers for our own engine; None for TensorFlow's.
      towers: this worker's towers, if each is several devices.
      task, devices, options: as for every engine.
      shares: relative sizes of the parts of this worker's towers.
      shares_by_worker: the shares of all towers, worker by worker.
      microbatches: number of microbatches of a step.
    """

    ring: Ring
    host: HostExchange
    exchange: WorkerExchange | None
    towers: GroupedTowers | None
    task: Task
    devices: Devices
    options: StepOptions
    shares: tuple[float, ...]
    shares_by_worker: list[tuple[float, ...]]
    microbatches: int

    def build(self, model: keras.Model, spec, stand_in: Batch | None) -> Engine:
        """Args:
        model: a built template.
        spec: spec of a batch, or of each microbatch.
        stand_in: an example for towers that have none; None for a ring of one worker.
        """
        stand_in = None if stand_in is None else tf.nest.map_structure(lambda tensor: tensor.numpy(), stand_in)
        spec = spec if isinstance(spec, Batch) else spec[0]
        if self.towers is not None:
            self.towers.divide(model, decided_by_first(self.host))
        units = self._units(model)
        named = self._named(spec, stand_in)
        if units is not None and self.towers is None:
            named |= gathered_towers(self.devices, units)
        if self.exchange is not None:
            return self._own(model, named, units)
        return self._tensorflows(model, named)

    def _named(self, spec: Batch, stand_in: Batch | None) -> dict:
        """The arguments that both engines take."""
        ring, all_shares = self.ring, tuple(itertools.chain(*self.shares_by_worker))
        parts = TowerParts(
            shares=self.shares,
            all_shares=all_shares,
            first_tower=sum(map(len, self.shares_by_worker[: ring.rank])),
            stand_in=stand_in,
        )

        return {
            "batch_spec": spec,
            "parts": parts,
            "tower_exchange": self._exchange_of_towers(len(all_shares)),
            # With accumulation a step's batch is a tuple of microbatches.
            "step_spec": spec if self.microbatches == 1 else (spec,) * self.microbatches,
        }

    def _exchange_of_towers(self, num_towers: int) -> TowerExchange | None:
        """An exchange over all towers of several workers, whose processes choose the same keys.

        None for a ring of one worker: the engine's own exchange has a new key. TensorFlow never forgets a key, and
        each ring counts its channels from 1.
        """
        if self.ring.num_workers == 1:
            return None

        def new_group_key() -> int:
            return _FIRST_TOWERS_GROUP_KEY + self.ring.next_channel()

        return TowerExchange(num_towers, new_group_key(), new_group_key)

    def _units(self, model: keras.Model) -> WorkerUnits | None:
        """The units of parameters if each worker holds only its own parts (ZeRO 3); otherwise None."""
        if self.devices.zero != 3:
            return None
        variables = ModelVariables.of(model)
        shards = self.towers.shards(variables) if self.towers is not None else None
        return WorkerUnits(variables, self.options.rule, self.exchange, shards)

    def _own(self, model: keras.Model, named: dict, units: WorkerUnits | None) -> RingEngine:
        of_towers = self._of_towers(named, units) if self.towers is not None else {}
        place = ring_placement(self.devices, self.exchange, self.towers, units)
        engine = RingEngine(
            self.task, model, self.devices, self.options, exchange=self.exchange, place=place, **named | of_towers
        )
        if units is not None:
            free_templates(engine.tower.variables.parameters)
        return engine

    def _of_towers(self, named: dict, units: WorkerUnits | None) -> dict:
        """The arguments for towers of several devices; all workers have then divided the model."""
        towers = self.towers
        at_once = towers.microbatches or 1
        spec = named["batch_spec"] if at_once == 1 else (named["batch_spec"],) * at_once
        return {
            "make_towers": functools.partial(towers.make_towers, exchange=units),
            "microbatches": towers.microbatches,
            "batch_spec": spec,
            "step_spec": spec if self.options.accumulation == 1 else (spec,) * self.options.accumulation,
        }

    def _tensorflows(self, model: keras.Model, named: dict) -> ReplicatedEngine:
        ring, devices = self.ring, self.devices
        several = ring.num_workers > 1
        if several:
            check_sent(ModelVariables.of(model))
        replicas = ring.multi_worker or mirrored(devices.towers[: max(1, num_gpus(devices))])
        return ReplicatedEngine(
            self.task,
            model,
            devices,
            self.options,
            strategy=replicas,
            wire_precision=ring.options.wire.precision if several else "float32",
            **named,
        )
