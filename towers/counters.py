"""Counters of a run: its progress, and its first step that was not finite. Checkpoints hold them.

They are on the device that decides whether a step is applied. What the host needs for a step is also in the host's
memory, so no step waits for the one before it.
"""

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from towers.devices import HOST
from towers.precision import LossScaling

_NONE = -1
# The `good_steps` of a run without loss scaling: another run must not resume with its loss scale.
_UNSCALED = -1


@dataclasses.dataclass(frozen=True)
class Counters:
    """Variables on one device.

    Attributes:
      step: number of global batches used; also the index of the next batch, and of its random numbers.
      examples: number of examples in these batches.
      updates: number of updates applied: steps minus skipped steps.
      skipped: number of steps whose update was skipped.
      bad_step: under on_nan='stop', the first step whose loss or gradients were not finite; else -1.
      loss_scale, good_steps: state of dynamic loss scaling; 1 and -1 without it.
      index: on the host, the index of the next batch: `step` until a step stops the run. If `step` is on the host,
        it is the same variable.
    """

    step: tf.Variable
    examples: tf.Variable
    updates: tf.Variable
    skipped: tf.Variable
    bad_step: tf.Variable
    loss_scale: tf.Variable
    good_steps: tf.Variable
    index: tf.Variable

    @classmethod
    def new(cls, scaling: LossScaling | None, device: str = HOST) -> "Counters":
        """The counters of a new run, on a device."""

        def count(value):
            return tf.Variable(tf.constant(value, tf.int64), trainable=False)

        with tf.device(device):
            scale = tf.Variable(scaling.initial if scaling else 1.0, dtype=tf.float32, trainable=False)
            good_steps = count(0 if scaling else _UNSCALED)
            step, *others = count(0), count(0), count(0), count(0), count(_NONE), scale, good_steps
        with tf.device(HOST):
            return cls(step, *others, index=step if device == HOST else count(0))

    @property
    def device(self) -> str:
        """The device of the counters."""
        return self.step.device

    def read_index(self) -> tf.Tensor:
        """The value of `index` in the host's memory.

        By itself `read_value` copies the value to the reader's current device, or to the first GPU if none is set.
        The host derives a step's seeds from it, and would wait for all work queued on that GPU.
        """
        with tf.device(HOST):
            return self.index.read_value()

    def on_one_device(self) -> "Counters":
        """The same counters, with `step` in place of `index`: for a graph that uses nothing on the host.

        The caller of that graph must call `advance_index` too.
        """
        return dataclasses.replace(self, index=self.step)

    def advance_index(self) -> None:
        """Counts one step on the host, in a graph."""
        if self.index is not self.step:
            with tf.device(HOST):
                self.index.assign_add(1)

    def variables(self) -> Mapping[str, tf.Variable]:
        """The variables that a checkpoint holds, by name."""
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del kept["bad_step"], kept["index"]
        return kept

    def restart(self, scaling: LossScaling | None) -> None:
        """Prepares restored counters for further training: forgets the bad step.

        Also restarts loss scaling if either the saved run or this one has none.
        """
        self.bad_step.assign(_NONE)
        if scaling is None or int(self.good_steps) == _UNSCALED:
            self.loss_scale.assign(scaling.initial if scaling else 1.0)
            self.good_steps.assign(0 if scaling else _UNSCALED)
        if self.index is not self.step:
            self.index.assign(int(self.step))

    def advance(self, examples, finite, loss_finite, scaling: LossScaling | None, stop: bool) -> None:
        """Counts one step, in a graph. With `stop`, no step is counted after a bad one.

        Under loss scaling an overflow (gradients not finite, loss finite) lowers the scale and skips the step. An
        overflow at the smallest scale counts as a bad step, like a loss that is not finite.
        """
        bad = tf.logical_not(finite)
        if scaling is not None:
            overflow_only = tf.logical_and(loss_finite, self.loss_scale > scaling.smallest)
            bad = tf.logical_and(bad, tf.logical_not(overflow_only))
            scale, good = scaling.next_state(self.loss_scale, self.good_steps, finite)
            self.loss_scale.assign(scale)
            self.good_steps.assign(good)
        running = self.bad_step.read_value() == _NONE
        applied = tf.logical_and(finite, running)
        self.updates.assign_add(tf.cast(applied, tf.int64))
        self.skipped.assign_add(tf.cast(tf.logical_and(tf.logical_not(finite), running), tf.int64))
        if stop:
            first_bad = tf.logical_and(bad, running)
            self.bad_step.assign(tf.where(first_bad, self.step.read_value(), self.bad_step.read_value()))
        with tf.device(HOST):
            if examples.dtype == tf.int32:  # int32 is on the host; workers with GPUs have int64 on the device
                examples = tf.cast(examples, tf.int64)
        with tf.control_dependencies([finite]):  # a step that ends in an error is not counted
            self.step.assign_add(tf.cast(running, tf.int64))
            self.examples.assign_add(tf.where(running, examples, 0))
        self.advance_index()
