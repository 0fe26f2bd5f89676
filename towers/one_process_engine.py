"""Towers on the devices of one process: the whole training step as graphs.

batch -> parts -> towers -> sums -> mean -> clip -> update      sums and update: where the parameters live
"""

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from towers import batch_stats
from towers.counters import Counters
from towers.devices import HOST
from towers.engine import Engine
from towers.input.placed_batch import examples_of, features_by_device, parts_of
from towers.input.tower_parts import microbatch
from towers.input.unprepared import Unprepared
from towers.input.wide_integers import narrowed
from towers.lookups import Lookups
from towers.mean_and_update import StepOutcome, finish_step
from towers.options import StepOptions
from towers.owners import CURRENT_DEVICE
from towers.packed_copies import UNPACKED, PackedCopies, PackedOwners
from towers.parameters.copied_placement import CopiedPlacement
from towers.parameters.placement import CentralPlacement, Placement
from towers.parameters.sharded_placement import ShardedPlacement
from towers.parameters.zero_of_groups import ZeroOfGroups
from towers.sums import add_to
from towers.task import Batch
from towers.timeline.activities import EXCHANGE_SCOPE, tower_scope
from towers.tower import ModelVariables, TowerResult
from towers.tower_passes import TowerPasses
from towers.tracing.drawn_numbers import drawn_by_tensorflow
from towers.updates.rules import UpdateRule

# Of a smaller table a step reads the whole as fast as some rows. A table that is read whole is copied before its
# update: with 10 million rows of 16 numbers a process trains 64 examples/s, by rows 13,600.
_LARGE_TABLE_BYTES = 4 << 20


def tables_by_rows(model: keras.Model, batch_spec: Batch, options: StepOptions) -> Lookups | None:
    """The tables of at least 4 MiB that a step can read by rows; None if there is none."""
    # XLA would recompile the tower for each number of rows. Features that towers have yet to prepare hold no ids.
    if options.xla or isinstance(batch_spec.features, Unprepared):
        return None
    return Lookups(model, batch_spec, at_least_bytes=_LARGE_TABLE_BYTES)


def reads_rows(model: keras.Model, batch_spec: Batch, options: StepOptions) -> bool:
    """Whether steps read rows of a large table; arguments as for `tables_by_rows`."""
    by_rows = tables_by_rows(model, batch_spec, options)
    return by_rows is not None and bool(by_rows.heights)


class OneProcessEngine(Engine):
    """Trains and evaluates batches on towers."""

    def __init__(
        self,
        *arguments,
        place: Callable[[ModelVariables, UpdateRule], Placement] | None = None,
        make_towers: Callable[[Engine], tuple[Sequence[Callable], Sequence[Callable]]] | None = None,
        microbatches: int | None = None,
        why_not_xla: str = "",
        **named,
    ):
        """Args:
        place: makes the placement of the model's variables; None for what `devices` says.
        make_towers: makes the engine's `towers` and `evaluations`; None for towers of one device.
        microbatches: as for `TowerPasses`.
        why_not_xla: a notice for the user: why XLA doesn't compile the step although it would by default; '' for
          none.
        *arguments, **named: as for `Engine`.
        """
        self._why_not_xla = why_not_xla
        super().__init__(*arguments, microbatches=microbatches, **named)
        self.placement = (place or self._place)(self.tower.variables, self.options.rule)
        if make_towers is not None:
            self.towers, self.evaluations = make_towers(self)
        self._passes = TowerPasses(
            self.towers,
            self.devices,
            self.parts,
            self.options,
            self.placement.owners,
            microbatches,
            self._copies,
            self._homes(),
            calls_of_batch=self.options.accumulation,
        )
        self._cuts = microbatches is None
        self._compiles_first = make_towers is None

    _needs_examples = True

    @property
    def _copies(self) -> PackedCopies:
        """How parameters, state and gradients are sent between the devices of towers and parameters."""
        # ZeRO 3 sends parameters layer by layer. In a tower of several devices, each device has its own
        # parameters.
        alone = self.devices.zero == 3 or self.devices.groups
        return UNPACKED if alone else PackedCopies(self.devices.packed)

    def _homes(self) -> list[str] | None:
        """The device of each part of the parameters, if they are sent to the towers."""
        if self._copies is UNPACKED:
            return None
        if isinstance(self.placement, ShardedPlacement):
            return [part.device for part in self.placement.parts]
        if isinstance(self.placement, CentralPlacement):
            return [self.placement.device] * len(self.placement.parameters)
        return None

    def _place(self, variables: ModelVariables, rule: UpdateRule) -> Placement:
        if self.devices.sharded or self.devices.zero == 3:
            return ShardedPlacement(variables, rule, self.devices.towers, copies=self._copies)
        if self.devices.replicated or self.devices.zero or self.devices.offload:
            return CopiedPlacement(
                variables,
                rule,
                self.devices.towers,
                owners=[self.devices.parameters] if self.devices.offload else None,
                slots_everywhere=self.devices.replicated,
                meet_late=self.devices.zero == 1,
                copies=self._copies,
            )
        home = self.devices.parameters
        homes = [home] * len(variables.parameters)
        owners = PackedOwners(CURRENT_DEVICE, self._copies, self.devices.towers, homes, home)
        compiled = bool(self.options.xla) and self.masked
        return CentralPlacement.of(variables, rule, home, owners, compiled=compiled)

    @property
    def notices(self):
        return [*super().notices, *self._notices_of_placement(), *self._notices_of_xla()]

    def _notices_of_xla(self) -> list[str]:
        return [f"XLA does not compile the step: {self._why_not_xla}"] if self._why_not_xla else []

    def _notices_of_placement(self) -> list[str]:
        if not isinstance(self.placement, ShardedPlacement | CopiedPlacement | ZeroOfGroups):
            return []
        devices = self.devices
        if devices.num_towers > 1 or devices.groups or devices.offload:
            return [self.placement.notice]
        nothing = f"{devices.spread} with 1 tower: it has everything, and nothing is divided or copied"
        name, _, _ = devices.spread.partition("=")
        return [f"{nothing}; use num_towers=2 or more, or omit {name}"]

    @functools.cached_property
    def _lookups(self) -> Lookups | None:
        """The large tables of which towers get only a batch's rows; None if they get whole tables.

        The chief of parameter servers never trains, so it never computes this.
        """
        if not isinstance(self.placement, CentralPlacement):
            return None
        return tables_by_rows(self.tower.model, self.batch_spec, self.options)

    def _read(self, batch):
        """Parameters and state for a step on a batch; of large tables only the rows that the batch names."""
        if self._lookups is None or not self._lookups.heights:
            return self.placement.read()
        with tf.device(HOST):
            by_part = [self._lookups.ids(narrowed(part, self.batch_spec)) for part in parts_of(batch)]
            ids = {name: tf.concat([found[name] for found in by_part], 0) for name in by_part[0]}
            rows = {name: tf.unique(tf.sort(found))[0] for name, found in ids.items()}
        return self.placement.read(rows)

    def first_sums(self, batch):
        parameters, state = self._read(batch)
        return self._sums_of(batch, 0, parameters, state, self.counters)

    def more_sums(self, batch, microbatch_index, sums):
        parameters, state = self._read(batch)
        # The state after the microbatches before this one is in the sums, not yet in the variables.
        state = batch_stats.after(state, sums.new_state)
        result = self._sums_of(batch, microbatch_index, parameters, state, self.counters)
        with tf.device(self.devices.parameters):
            return add_to(sums, result, self.placement.owners.add)

    def _sums_of(self, batch, microbatch_index, parameters, state, counters: Counters) -> TowerResult:
        own = batch
        if isinstance(batch, Batch) and self._cuts:
            own = microbatch(batch, microbatch_index, self.options.accumulation)
        step, loss_scale = counters.read_index(), counters.loss_scale.read_value()
        return self._passes.train(own, microbatch_index, parameters, state, step=step, loss_scale=loss_scale)

    def apply(self, batch, sums, rate):
        return self._applied(batch, sums, rate, self.counters)

    def _applied(self, batch, sums, rate, counters: Counters) -> StepOutcome:
        with tf.device(self.devices.parameters), tf.name_scope(EXCHANGE_SCOPE):
            summed = self.placement.owners.meet(sums.gradients)
        return finish_step(
            sums._replace(gradients=summed),
            rate,
            examples=examples_of(batch),
            features=features_by_device(batch, HOST, self.devices.towers),
            placement=self.placement,
            device=self.devices.parameters,
            options=self.options,
            counters=counters,
            masked=self.masked,
        )

    def rates(self, of_steps):
        if not self._compiles_updates:
            return of_steps
        # One copy for all of these steps: each copy to a GPU waits for the copy of the next batch.
        with tf.device(HOST):
            found = tf.constant(of_steps, tf.float32)
        with tf.device(self.devices.parameters):
            return tf.unstack(tf.identity(found))

    def train_in_graph(self, batch, rate):
        if not self._compiles_steps:
            return super().train_in_graph(batch, rate)
        with tf.device(self.devices.parameters), tf.name_scope(tower_scope(0)):
            (part,) = parts_of(batch)
            outcome = self._compiled_step(part, rate)
        self.counters.advance_index()
        return outcome._replace(examples=examples_of(batch))

    @functools.cached_property
    def _compiled_step(self):
        """The step as one function, traced once: XLA caches what it compiled under the function's name."""
        return tf.function(drawn_by_tensorflow()(self._train_compiled), jit_compile=True, autograph=False)

    def _train_compiled(self, part, rate):
        """All of a step that the device computes. It reads nothing from the host, because it would wait for it."""
        counters, (parameters, state) = self.counters.on_one_device(), self.placement.read()
        sums = self._sums_of(part, 0, parameters, state, counters)
        # The host fills in the number of examples, which it knows.
        return self._applied(part, sums, rate, counters)._replace(examples=())

    @functools.cached_property
    def _compiles_steps(self) -> bool:
        """Whether XLA compiles all of a step as one.

        A GPU waits for the host between operations. A step of ResNet-20 on an H100 (bfloat16, 1,024 examples) took
        9.6 ms with tower, mean and update compiled apart, 8.7 as one; its kernels take 6.0.
        """
        if not self._compiles_updates or self.options.accumulation > 1:
            return False
        # A compiled function can use variables of its own device only. TensorFlow keeps int32 variables on the
        # host.
        devices = {variable.device for variable in self.placement.state.values()}
        if self.devices.towers != (self.devices.parameters,) or devices - {self.counters.device}:
            return False
        # Traced here: within the step its random numbers would be replaced twice.
        gradients = self.first_function.get_concrete_function().structured_outputs.gradients
        return self.placement.compiles(self.options.rule, gradients)

    @property
    def _compiles_updates(self) -> bool:
        """Whether XLA compiles updates where it can."""
        return isinstance(self.placement, CentralPlacement) and self.placement.compiled

    def evaluate_towers(self, batch):
        return self._passes.evaluate(self.evaluations, batch, *self.placement.read())
