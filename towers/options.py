"""How a step computes: the options that are the same in every mode."""

import dataclasses

import keras

from towers.batch_stats import check_batch_stats
from towers.devices import Devices
from towers.errors import UserError, check_kind, is_integer
from towers.hardware.cpu_instructions import (
    AMX_BFLOAT16,
    AVX2,
    AVX512,
    FAST_BFLOAT16,
    HALVED_AVX512,
    has_avx2_alone,
)
from towers.hardware.cpu_kernels import runs_onednn
from towers.layers.kernels import LayerKernels
from towers.precision import SHORT_PRECISIONS, check_precision
from towers.recompute.segments import check_recompute
from towers.updates.clipping import Clipping
from towers.updates.keras_optimizers import translate
from towers.updates.rules import Momentum, UpdateRule
from towers.updates.schedules import Constant, Schedule, rate_at

# Compiled loops hardly use a second thread. With AVX2 alone and two threads per tower, batch norms take 0.4 of
# Keras's wall time; with AVX-512 and two threads the fused kernel is faster, even where it runs twice.
_THREADS_WITH_AVX2 = 2
# Channels of convolutions by Winograd's method, on one thread: with AVX2 alone or AVX-512 in halves, and with
# whole AVX-512, where a direct convolution takes half the time. Two threads need four times as many
# (`towers/layers/convolutions/winograd.py`).
_FEWEST_WITH_AVX2, _FEWEST_WITH_AVX512 = 32, 64
ON_NAN = ("stop", "skip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a training step.

    Attributes:
      rule, schedule, clipping: how mean gradients change the parameters.
      accumulation: number of microbatches that a batch is divided into. They run one after another, to save
        memory.
      batch_stats: 'average' averages the towers' batch statistics by weight, 'first' takes the first tower's,
        'synced' computes those of the whole batch.
      precision: number format of the layers' computation; parameters are float32 (float64 for 'float64').
      xla: compile the tower function with XLA, and on one GPU all of the step. None leaves the choice to the
        strategy 'towers', which compiles on one GPU if XLA can (`towers.xla_choice`); in other strategies None
        means False.
      fused_batch_norm: run Keras's BatchNormalization on TensorFlow's fused kernel, or, with `tuned_for_cpu` on
        CPUs where that is slow, on compiled loops.
      tuned_for_cpu: on CPU towers, use our own kernels for activations, convolutions and, with AVX2 alone or
        synced statistics, batch norms; multiply in float32 where that is faster than `precision` (see
        `LayerKernels`).
      recompute: activations that the backward pass computes again, to save memory: 'none', those of the 'blocks'
        that the model repeats, of 'sqrt' (about sqrt(n) segments), or of all parts ('full'). The numbers stay.
      on_nan: after a step whose loss or gradients are not finite, 'stop' training or 'skip' the update.
      seed: random seed for initial weights and dropout.

    Raises:
      UserError: an option is unknown, out of range or of another type, or `xla` is combined with `recompute`.
    """

    rule: UpdateRule = dataclasses.field(default_factory=Momentum)
    schedule: Schedule = dataclasses.field(default_factory=lambda: Constant(0.1))
    clipping: Clipping = dataclasses.field(default_factory=Clipping)
    accumulation: int = 1
    batch_stats: str = "average"
    precision: str = "float32"
    xla: bool | None = None
    fused_batch_norm: bool = True
    tuned_for_cpu: bool = True
    recompute: str = "none"
    on_nan: str = "stop"
    seed: int = 0

    @classmethod
    def of_keras(cls, optimizer: keras.optimizers.Optimizer, **others) -> "StepOptions":
        """Options with the rule, schedule and clipping of a Keras optimizer.

        Args:
          optimizer: SGD, Adam or AdamW, without steps taken.
          **others: the other attributes of this class.

        Raises:
          UserError: the optimizer or one of its options is not supported.
        """
        return cls(**translate(optimizer)._asdict(), **others)

    def rate(self, step: int) -> float:
        """The learning rate of a step.

        Raises:
          UserError: the schedule returns anything but one finite number of at least 0.
        """
        return rate_at(self.schedule, step)

    def kernels(self, devices: Devices, num_examples: int | None = None) -> LayerKernels:
        """Which layers use other kernels than Keras's on these devices.

        Args:
          devices: devices of the towers.
          num_examples: number of examples that a tower computes at once, equal in all processes; None if unknown.
        """
        # XLA compiles the whole tower by itself.
        tuned = self.tuned_for_cpu and devices.on_cpu and not self.xla
        found = devices.cpu_instructions
        # With AVX2 alone oneDNN's batch norm takes up to 1.5 times as long as Keras's operations.
        # With AVX-512 it takes a third, and so do compiled loops with both, but a loop has one thread.
        avx2_alone = has_avx2_alone(found) and runs_onednn()
        loses = devices.on_cpu and avx2_alone and not self.xla
        compiles = tuned and devices.compiles_kernels
        few_threads = 1 <= devices.threads_per_tower <= _THREADS_WITH_AVX2
        one_thread = devices.threads_per_tower == 1
        compiles_norms = compiles and AVX2 in found and (few_threads if avx2_alone else one_thread)
        multiplies_bfloat16 = FAST_BFLOAT16 in found and runs_onednn()
        is_short = self.precision in SHORT_PRECISIONS
        amx = tuned and self.precision == "bfloat16" and multiplies_bfloat16 and AMX_BFLOAT16 in found
        # Compiled code reads nothing on the host.
        as_on_gpus = devices.input_on_towers and not self.xla
        # Float16 convolutions take 4 to 250 times as long as float32's (AVX512-FP16; AMX-FP16 was not measured).
        is_slow = is_short and (self.precision == "float16" or not multiplies_bfloat16)
        return LayerKernels(
            fused_batch_norm=self.fused_batch_norm and not loses,
            compiled_batch_norm=self.fused_batch_norm and compiles_norms,
            compiled_activations=compiles,
            compiled_relu=compiles and is_short and one_thread and AVX512 in found,
            examples_as_channels=tuned and runs_onednn() and AVX2 in found and (few_threads or amx),
            amx=amx,
            num_threads=devices.threads_per_tower,
            winograd_channels=self._winograd_channels(devices) if compiles and few_threads else 0,
            num_examples=num_examples,
            # Elsewhere, as on ARM, nothing was measured.
            float32_products=tuned and is_slow and AVX2 in found,
            exact_bias_gradients=self.precision == "bfloat16" and devices.on_cpu and not self.xla,
            wide_ids=as_on_gpus,
            values_on_host=as_on_gpus,
            deterministic=devices.deterministic and not devices.on_cpu,
        )

    @staticmethod
    def _winograd_channels(devices: Devices) -> int:
        """The attribute of `LayerKernels`; 0 where other kernels than oneDNN's were not compared."""
        found = devices.cpu_instructions
        if not runs_onednn() or AVX2 not in found:
            return 0
        short_vectors = has_avx2_alone(found) or HALVED_AVX512 in found
        fewest = _FEWEST_WITH_AVX2 if short_vectors else _FEWEST_WITH_AVX512
        return fewest * devices.threads_per_tower**2

    def __post_init__(self):
        check_batch_stats(self.batch_stats)
        check_precision(self.precision)
        check_recompute(self.recompute)
        if self.xla and self.recompute != "none":
            raise UserError(
                f"xla=True with recompute={self.recompute!r}: XLA decides itself which activations it keeps; "
                "omit one of them"
            )
        self._check_types()
        if self.accumulation < 1:
            raise UserError(
                f"accumulation={self.accumulation}: it must be at least 1; 1 does not divide the batch"
            )
        if self.on_nan not in ON_NAN:
            raise UserError(f"on_nan={self.on_nan!r} is unknown: use one of {', '.join(ON_NAN)}")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed}: it must be from 0 to {2**31 - 1}")
        for name in ("accumulation", "seed"):
            # Keras takes no NumPy integer as a seed.
            object.__setattr__(self, name, int(getattr(self, name)))

    def _check_types(self) -> None:
        for name, example in (("accumulation", 2), ("seed", 0)):
            value = getattr(self, name)
            if not is_integer(value):
                raise UserError(f"{name}={value!r}: must be an integer; use for example {name}={example}")
        if isinstance(self.rule, keras.optimizers.Optimizer):
            raise UserError(
                f"rule={type(self.rule).__name__}: must be a rule of towers.updates.rules; pass a Keras optimizer "
                "to StepOptions.of_keras(optimizer)"
            )
        if isinstance(self.rule, type) or not hasattr(self.rule, "slot_names"):
            raise UserError(
                f"rule={self.rule!r}: must be a rule of towers.updates.rules; pass for example rule=Momentum()"
            )
        check_kind("clipping", self.clipping, Clipping, "pass for example Clipping(norm=1.0)")
        if not callable(self.schedule):
            raise UserError(
                f"schedule={self.schedule!r}: must be a function from step to learning rate; "
                "use for example towers.updates.schedules.Constant(0.1)"
            )
        self.rate(0)  # calls a custom schedule early, before anything is written


def check_step_options(options: object) -> None:
    """Raises UserError if `options` is not a `StepOptions` (but, for example, a Keras optimizer)."""
    check_kind("options", options, StepOptions, "a Keras optimizer becomes one by StepOptions.of_keras(optimizer)")
