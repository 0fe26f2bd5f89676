"""Towers on the devices of one process: the whole training step as graphs.

batch -> parts -> towers -> sums -> mean -> clip -> update      sums and update: where the parameters live
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.devices import HOST
from towers.engine import Engine
from towers.lookups import Lookups
from towers.mean_and_update import finish_step
from towers.parameters.copied_placement import CopiedPlacement
from towers.parameters.placement import CentralPlacement, Placement
from towers.parameters.sharded_placement import ShardedPlacement
from towers.parameters.zero_of_groups import ZeroOfGroups
from towers.sums import add_to
from towers.task import batch_length
from towers.timeline.activities import EXCHANGE_SCOPE
from towers.tower import ModelVariables, TowerResult
from towers.tower_parts import TowerParts, microbatch
from towers.tower_passes import TowerPasses
from towers.updates.rules import UpdateRule

# A step reads a smaller table as fast as its rows.
_LARGE_TABLE_BYTES = 4 << 20


class OneProcessEngine(Engine):
    """Trains and evaluates batches on towers."""

    def __init__(
        self,
        *arguments,
        place: Callable[[ModelVariables, UpdateRule], Placement] | None = None,
        make_towers: Callable[[Engine], tuple[Sequence[Callable], Sequence[Callable]]] | None = None,
        microbatches: int | None = None,
        **named,
    ):
        """Args:
        place: makes the placement of the model's variables; None for what `devices` says.
        make_towers: makes the engine's `towers` and `evaluations`; None for towers of one device.
        microbatches: as for `TowerPasses`.
        *arguments, **named: as for `Engine`.
        """
        super().__init__(*arguments, **named)
        self.placement = (place or self._place)(self.tower.variables, self.options.rule)
        if make_towers is not None:
            self.towers, self.evaluations = make_towers(self)
        parts = TowerParts.of_one_process(self.shares)
        self._passes = TowerPasses(
            self.towers, self.devices, parts, self.options, self.placement.owners, microbatches
        )

    def _place(self, variables: ModelVariables, rule: UpdateRule) -> Placement:
        if self.devices.sharded or self.devices.zero == 3:
            return ShardedPlacement(variables, rule, self.devices.towers)
        if self.devices.replicated or self.devices.zero or self.devices.offload:
            return CopiedPlacement(
                variables,
                rule,
                self.devices.towers,
                owners=[self.devices.parameters] if self.devices.offload else None,
                slots_everywhere=self.devices.replicated,
                meet_late=self.devices.zero == 1,
            )
        return CentralPlacement.of(variables, rule, self.devices.parameters)

    @property
    def notices(self):
        if isinstance(self.placement, ShardedPlacement | CopiedPlacement | ZeroOfGroups):
            return [*super().notices, self.placement.notice]
        return super().notices

    @functools.cached_property
    def _lookups(self) -> Lookups | None:
        """The large tables, of which towers get the rows of a batch; None if they get whole tables.

        A chief of parameter servers never trains, so it never asks.
        """
        # XLA would compile the tower anew for each number of rows.
        if self.options.xla or not isinstance(self.placement, CentralPlacement):
            return None
        return Lookups(self.tower.model, self._batch_spec, at_least_bytes=_LARGE_TABLE_BYTES)

    def _read(self, batch):
        """Parameters and state for a step on a batch; of large tables the rows that the batch names."""
        if self._lookups is None or not self._lookups.heights:
            return self.placement.read()
        with tf.device(HOST):
            ids = {name: tf.unique(tf.sort(found))[0] for name, found in self._lookups.ids(batch).items()}
        return self.placement.read(ids)

    def first_sums(self, batch):
        parameters, state = self._read(batch)
        return self._sums_of(batch, 0, parameters, state)

    def more_sums(self, batch, microbatch_index, sums):
        parameters, _ = self._read(batch)
        # The state after the microbatches before this one is in the sums, not yet in the variables.
        result = self._sums_of(batch, microbatch_index, parameters, sums.new_state)
        with tf.device(self.devices.parameters):
            return add_to(sums, result, self.placement.owners.add)

    def _sums_of(self, batch, microbatch_index, parameters, state) -> TowerResult:
        own = microbatch(batch, microbatch_index, self.options.accumulation)
        step, loss_scale = self.counters.step.read_value(), self.counters.loss_scale.read_value()
        return self._passes.train(own, microbatch_index, parameters, state, step=step, loss_scale=loss_scale)

    def apply(self, batch, sums, rate):
        with tf.device(self.devices.parameters), tf.name_scope(EXCHANGE_SCOPE):
            summed = self.placement.owners.meet(sums.gradients)
        return finish_step(
            sums._replace(gradients=summed),
            rate,
            examples=batch_length(batch),
            features=batch.features,
            placement=self.placement,
            device=self.devices.parameters,
            options=self.options,
            counters=self.counters,
        )

    def evaluate_towers(self, batch):
        return self._passes.evaluate(self.evaluations, batch, *self.placement.read())
