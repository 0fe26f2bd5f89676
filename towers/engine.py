"""What every synchronous engine of one process has: the tower, the counters, and a step in one or several calls.

undivided         one graph:  first_sums, apply
accumulation = n  first_sums on microbatch 0;  more_sums on 1 .. n - 1;  apply
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from towers import split
from towers.counters import Counters
from towers.devices import HOST, Devices
from towers.exchange import TowerExchange
from towers.hardware.gpus import gpus_are_whole
from towers.input.placed_batch import examples_of, parts_of
from towers.input.placed_input import PlacedInput, can_be_placed
from towers.input.tower_parts import TowerParts
from towers.launch_order import LaunchOrder
from towers.layers.batch_norm.calls import check_synchronized
from towers.mean_and_update import StepOutcome
from towers.options import StepOptions
from towers.parameters.placement import Placement
from towers.precision import loss_scaling_for
from towers.task import Batch, Task, batch_length, evaluation_batch_size
from towers.together.traced_together import TracedTogether
from towers.tower import EvaluationFunction, EvaluationResult, TowerFunction, TowerResult
from towers.tracing.compile_ahead import compile_ahead
from towers.tracing.traced_once import TracedOnce

_RATE = tf.TensorSpec([], tf.float32)


class Engine(abc.ABC):
    """Trains and evaluates global batches. A subclass decides where variables live and how sums are exchanged.

    Attributes:
      placement: where the variables live; a subclass sets it.
      tower: the training pass on one device; it knows the model's variables.
      parts: how the towers of this process divide a (micro)batch.
      batch_spec: the spec of a (micro)batch of the task's dataset; the batches that reach the towers may have
        other dtypes.
      placed_input: copies training batches to the towers' devices; `train` then takes what it yields. None if
        `train` takes batches in the host's memory.
      towers, evaluations: the passes of each tower of this process, called as a `TowerFunction` and an
        `EvaluationFunction`. Each tower of several devices has a pass of its own. One pass may also compute all
        towers, as for `TowerPasses`.
      kernels, evaluation_kernels: which layers use other kernels than Keras's, in training and in evaluation.
      masked: whether masks skip an update that is not finite, as in `towers.parameters.permission`.
    """

    placement: Placement

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        devices: Devices,
        options: StepOptions,
        *,
        batch_spec: Batch,
        parts: TowerParts | None = None,
        tower_exchange: TowerExchange | None = None,
        step_spec=None,
        microbatches: int | None = None,
        traced: Callable = TracedOnce,
    ):
        """Args:
        task: gives the loss and the metrics.
        model: a built template; its variables are read once, for their first values.
        devices: devices of the towers and the parameters.
        options: options of the step.
        batch_spec: the spec of a (micro)batch, dimension 0 open.
        parts: how the towers of this process divide a (micro)batch; None for equal parts, and all towers here.
        tower_exchange: sums batch statistics over all towers, under batch_stats='synced'; None for one over the
          towers of this process.
        step_spec: the spec of what `apply` gets as its batch; None for batch_spec, a whole batch.
        microbatches: as for `TowerPasses`.
        traced: makes the graph of one tower (`TracedOnce`) or of all towers together (`TracedTogether`).

        Raises:
          UserError: a batch too small for all towers, or a batch norm that asks for synchronized statistics
            without batch_stats='synced'.
        """
        self.options = options
        self.devices = devices
        self.batch_spec = parts_of(batch_spec)[0]
        self.parts = TowerParts.of_one_process(devices.num_towers) if parts is None else parts
        all_shares = self.parts.all_shares
        split.check_batch_size(task.batch_size, options.accumulation, all_shares, len(self.parts.shares))
        check_synchronized(model, batch_stats=options.batch_stats, num_towers=len(all_shares))
        num_cuts = options.accumulation * (microbatches or 1)
        num_examples = split.fewest_examples(task.batch_size, num_cuts, all_shares)
        self.kernels = options.kernels(devices, num_examples)
        evaluated = split.fewest_examples(evaluation_batch_size(task), 1, all_shares)
        # XLA compiles training passes only.
        self.evaluation_kernels = dataclasses.replace(options, xla=False).kernels(devices, evaluated)
        if tower_exchange is None and len(all_shares) > 1:
            tower_exchange = TowerExchange(len(all_shares))
        if tower_exchange is not None and not devices.on_cpu:
            tower_exchange.order = LaunchOrder()
            tower_exchange.hint = "nccl" if gpus_are_whole() else "auto"
        self.tower = TowerFunction(
            task,
            model,
            exchange=tower_exchange if options.batch_stats == "synced" else None,
            kernels=self.kernels,
            xla=options.xla,
            traced=traced,
            recompute=options.recompute,
            batch_spec=self.batch_spec,
        )
        num_passes = 1 if isinstance(self.tower.traced, TracedTogether) else devices.num_towers
        self.towers: Sequence[Callable[..., TowerResult]] = [self.tower] * num_passes
        evaluation = EvaluationFunction(task, model, kernels=self.evaluation_kernels, traced=traced)
        self.evaluations: Sequence[Callable[..., EvaluationResult]] = [evaluation] * num_passes
        updating = self._updating_device()
        self.masked = devices.masked(updating)
        device = updating if self.masked else HOST
        self.counters = Counters.new(loss_scaling_for(options.precision), device)
        self._batch_spec, self._step_spec = batch_spec, batch_spec if step_spec is None else step_spec
        self.placed_input: PlacedInput | None = None
        if devices.input_on_towers and can_be_placed(batch_spec):
            self._place_input(microbatches, batches_are_whole=step_spec is None)
        self.train_function = _graph_of(self.train_in_graph, self._batch_spec, _RATE)
        self._evaluate_function = tf.function(self.evaluate_towers, autograph=False)
        self.first_function = _graph_of(self.first_sums, self._batch_spec)

    def _place_input(self, microbatches: int | None, *, batches_are_whole: bool) -> None:
        """Sets `placed_input`, whose batches `train` then takes."""
        own = {"parts": self.parts, "devices": self.devices.towers}
        batch_spec, step_spec = self._batch_spec, self._step_spec
        if batches_are_whole:
            count = self.options.accumulation
            self.placed_input = PlacedInput(**own, accumulation=count, microbatches=microbatches)
            self._step_spec = self.placed_input.spec(batch_spec)
            self._batch_spec = self._step_spec if count == 1 else self._step_spec[0]
            return
        self.placed_input = PlacedInput(**own)
        self._batch_spec = self.placed_input.spec(batch_spec)
        self._step_spec = self._batch_spec if step_spec is batch_spec else self.placed_input.spec(step_spec)

    @property
    def spec(self) -> Batch:
        """The spec of a batch for `train_in_graph`."""
        return self._batch_spec

    @functools.cached_property
    def more_function(self):
        """`more_sums` as a graph. It is traced once: collectives of different traces would not find each other."""
        return _graph_of(self.more_sums, self._batch_spec, tf.TensorSpec([], tf.int32), self._sums_spec)

    @functools.cached_property
    def apply_function(self):
        """`apply` as a graph, traced once as `more_function` is."""
        return _graph_of(self.apply, self._step_spec, self._sums_spec, _RATE)

    @property
    def _sums_spec(self):
        sums = self.first_function.get_concrete_function().structured_outputs
        return tf.nest.map_structure(tf.type_spec_from_value, sums)

    def _updating_device(self) -> str:
        """The device that decides whether a step is applied."""
        return self.devices.parameters

    def rates(self, of_steps: Sequence[float]) -> Sequence[float | tf.Tensor]:
        """One learning rate for each step, in the form that `train` takes fastest."""
        return of_steps

    def train(self, batch: Batch | tuple[Batch, ...], rate: float | tf.Tensor) -> StepOutcome:
        """One step on a global batch. The devices may still be computing the scalars that this returns.

        Each microbatch is a call of its own, so memory and graph are those of one microbatch. A process that gets
        only its part of each microbatch gets them as a tuple. With a `placed_input` the batch is one that it
        yields.
        """
        if self._compiles_first and self.placed_input is None:
            self._compile_ahead(batch)
        self._compiles_first = False
        if not isinstance(rate, tf.Tensor):
            with tf.device(HOST):  # a number from Python would wait for all work queued on a GPU
                rate = tf.constant(rate, tf.float32)
        if self.options.accumulation == 1:
            return self.train_function(batch, rate)
        if not isinstance(batch, Batch):
            sums = self.first_function(batch[0])
            for index, own in enumerate(batch[1:], start=1):
                if self._needs_examples and int(examples_of(own)) == 0:
                    continue
                sums = self.more_function(own, tf.constant(index), sums)
            return self.apply_function(batch, sums, rate)
        sizes = split.sizes(int(batch_length(batch)), split.even_shares(self.options.accumulation))
        sums = self.first_function(batch)
        for index, size in enumerate(sizes[1:], start=1):
            # A last batch with fewer examples than microbatches leaves some empty: kernels fail on empty tensors.
            if size > 0:
                sums = self.more_function(batch, tf.constant(index), sums)
        return self.apply_function(batch, sums, rate)

    def _compile_ahead(self, batch: Batch | tuple[Batch, ...]) -> None:
        """Starts to compile, in the background, the kernels for the towers' parts of this batch."""
        first, num_passes = (batch, self.options.accumulation) if isinstance(batch, Batch) else (batch[0], 1)
        at_once, *_ = split.sizes(int(batch_length(first)), split.even_shares(num_passes))
        calls = {
            # An idle tower computes one example.
            device: self.kernels.compiled_calls(self.tower.model, max(count, 1))
            for device, count in zip(self.devices.towers, split.sizes(at_once, self.parts.shares), strict=True)
        }
        if any(calls.values()):
            compile_ahead(calls)

    # Whether the next `train` compiles kernels ahead. Engines whose towers `make_towers` makes do not.
    _compiles_first = True

    # Whether an empty microbatch is skipped: only if no other process waits for this one's sums.
    _needs_examples = False

    def evaluator(self, batch_spec: Batch) -> Callable[[Batch], EvaluationResult]:
        """A function from a batch to its undivided loss and metrics; traced once for each spec.

        Args:
          batch_spec: the spec of the evaluation batches, dimension 0 open; it may differ from that of training.
        """
        return self._evaluate_function.get_concrete_function(batch_spec)

    def graph(self) -> tf.Graph:
        """The graph of a training step, for TensorBoard."""
        function = self.train_function if self.options.accumulation == 1 else self.first_function
        return function.get_concrete_function().graph

    def train_in_graph(self, batch: Batch, rate: tf.Tensor) -> StepOutcome:
        """One step on an undivided batch. Call it while tracing a graph."""
        return self.apply(batch, self.first_sums(batch), rate)

    @property
    def notices(self) -> list[str]:
        """Lines for the user about the devices."""
        return self.devices.notices

    def parameters(self) -> Mapping[str, tf.Variable]:
        """The parameters by canonical name."""
        return self.placement.parameters

    def state(self) -> Mapping[str, tf.Variable]:
        """The state by canonical name."""
        return self.placement.state

    def slots(self) -> Mapping[str, Mapping[str, tf.Variable]]:
        """The optimizer state by slot name and canonical name."""
        return self.placement.slots

    @abc.abstractmethod
    def first_sums(self, batch: Batch):
        """The towers' sums over microbatch 0 (or the whole batch)."""

    @abc.abstractmethod
    def more_sums(self, batch: Batch, microbatch_index: tf.Tensor, sums):
        """`sums` plus the towers' sums over microbatch `microbatch_index`."""

    @abc.abstractmethod
    def apply(self, batch: Batch, sums, rate: tf.Tensor) -> StepOutcome:
        """Divides, checks, clips, updates and counts."""

    @abc.abstractmethod
    def evaluate_towers(self, batch: Batch) -> EvaluationResult:
        """The sums of the towers' evaluations of their parts of a batch that is not empty."""


class _Graph:
    """A function of one signature as a graph.

    It is traced before its first call. TensorFlow counts traces during calls, over all engines of a process, and
    warns of retracing at the fifth. And a `tf.function` looks its trace up in each call, by the types of all
    arguments and variables: 0.5 ms for 400 variables.
    """

    def __init__(self, function, signature):
        self._function = tf.function(function, input_signature=signature, autograph=False)

    def __call__(self, *arguments):
        return self._concrete(*arguments)

    def get_concrete_function(self):
        return self._concrete

    @functools.cached_property
    def _concrete(self):
        return self._function.get_concrete_function()


def _graph_of(function, *signature):
    return _Graph(function, signature)
