"""Flags of how a step computes: optimizer, schedule, clipping, precision."""

from collections.abc import Callable

from absl import flags

from launch.flags.checks import at_least_zero, listed_in_help, positive
from towers.batch_stats import POLICIES
from towers.errors import UserError
from towers.options import ON_NAN, StepOptions
from towers.precision import PRECISIONS
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import Lookahead, ScaledRates
from towers.updates.rules import SGD, Adam, Momentum, Muon, UpdateRule, everything, matrices_only
from towers.updates.schedules import Constant, Cosine, OneCycle, Piecewise, Schedule, Triangular, WarmUp

FLAGS = flags.FLAGS

_RULES: dict[str, Callable[..., UpdateRule]] = {
    "sgd": lambda **decay: SGD(**decay),
    "momentum": lambda **decay: Momentum(momentum=FLAGS.momentum, **decay),
    "nesterov": lambda **decay: Momentum(momentum=FLAGS.momentum, nesterov=True, **decay),
    "adam": lambda **decay: Adam(beta_1=FLAGS.adam_beta_1, beta_2=FLAGS.adam_beta_2, **decay),
    "adamw": lambda **decay: Adam(beta_1=FLAGS.adam_beta_1, beta_2=FLAGS.adam_beta_2, **decay),
    "muon": lambda **decay: Muon(momentum=FLAGS.momentum, **decay),
}
# Peaks and decays that suit the networks here, which have batch norm, at batches of about 128.
_DEFAULT_RATES = {"sgd": 0.2, "momentum": 0.2, "nesterov": 0.2, "adam": 2e-3, "adamw": 2e-3, "muon": 0.02}
_DEFAULT_DECAYS = {"sgd": 0.0, "momentum": 5e-3, "nesterov": 5e-3, "adam": 0.0, "adamw": 5e-3, "muon": 0.015}

flags.DEFINE_enum("optimizer", "nesterov", tuple(_RULES), "Update rule.")
flags.DEFINE_float("learning_rate", None, "Peak learning rate; default: 0.2, adam and adamw 0.002, muon 0.02.")
flags.DEFINE_enum(
    "schedule",
    "one_cycle",
    ("constant", "piecewise", "cosine", "one_cycle", "triangular"),
    "The rate over the steps.",
)
flags.DEFINE_integer("warmup_steps", 0, "Steps over which the rate rises to the schedule's.")
flags.DEFINE_list("boundaries", [], "piecewise: steps at which the rate is multiplied by --decay_factor.")
flags.DEFINE_float("decay_factor", 0.1, "piecewise: factor at each boundary.")
flags.DEFINE_float("momentum", 0.9, "Of momentum, nesterov and muon.")
flags.DEFINE_float("adam_beta_1", 0.9, "Decay of the first moment of adam and adamw.")
flags.DEFINE_float("adam_beta_2", 0.999, "Decay of the second moment of adam and adamw.")
flags.DEFINE_float(
    "weight_decay", None, "Decoupled: w -= rate * this * w. Default: 0.005, adam and sgd 0, muon 0.015."
)
flags.DEFINE_bool("decay_all", False, "Decay biases and norm layers too, not kernels and embeddings alone.")
flags.DEFINE_float("norm_bias_rate_factor", 1.0, "Times the rate for the biases of batch norms.")
flags.DEFINE_integer(
    "lookahead_every", None, "Updates from one averaging of the weights to the next; default: none are averaged."
)
flags.DEFINE_float("clip_value", None, "Clip every element of the averaged gradients to this.")
flags.DEFINE_float("clip_norm", None, "Clip every parameter's averaged gradient to this norm.")
flags.DEFINE_float("clip_global_norm", None, "Clip the norm over all averaged gradients to this.")
flags.DEFINE_integer("accumulation", 1, "Microbatches of a batch, one after another, to save memory.")
flags.DEFINE_enum("batch_stats", "average", POLICIES, "Batch-norm statistics over the towers.")
flags.DEFINE_enum("precision", "float32", PRECISIONS, "What layers compute in; parameters are float32.")
flags.DEFINE_bool("xla", False, "Compile the tower function with XLA.")
flags.DEFINE_bool("fused_batch_norm", True, "Run batch norm on TensorFlow's fused kernel.")
flags.DEFINE_bool("tuned_for_cpu", True, "On CPUs, compile GELU and SiLU, lay small images out for convolutions.")
flags.DEFINE_enum("on_nan", "stop", ON_NAN, "A step that is not finite: stop training, or skip its update.")
flags.DEFINE_integer("seed", 0, "Of weights, order of examples, augmentation and dropout.")
positive(
    "norm_bias_rate_factor",
    "lookahead_every",
    "clip_value",
    "clip_norm",
    "clip_global_norm",
    "accumulation",
    "decay_factor",
)
at_least_zero("learning_rate", "weight_decay", "warmup_steps", "seed")
listed_in_help(__name__)


def options_from_flags(num_steps: int) -> StepOptions:
    """How a step computes; `num_steps` is the length of the run, for the schedule."""
    return StepOptions(
        rule=rule_from_flags(num_steps),
        schedule=schedule_from_flags(num_steps),
        clipping=Clipping(value=FLAGS.clip_value, norm=FLAGS.clip_norm, global_norm=FLAGS.clip_global_norm),
        accumulation=FLAGS.accumulation,
        batch_stats=FLAGS.batch_stats,
        precision=FLAGS.precision,
        xla=FLAGS.xla,
        fused_batch_norm=FLAGS.fused_batch_norm,
        tuned_for_cpu=FLAGS.tuned_for_cpu,
        on_nan=FLAGS.on_nan,
        seed=FLAGS.seed,
    )


def rule_from_flags(num_steps: int) -> UpdateRule:
    """The update rule of --optimizer and its numbers, and what stands around it."""
    decay = _DEFAULT_DECAYS[FLAGS.optimizer] if FLAGS.weight_decay is None else FLAGS.weight_decay
    rule = _RULES[FLAGS.optimizer](weight_decay=decay, decays=everything if FLAGS.decay_all else matrices_only)
    if FLAGS.norm_bias_rate_factor != 1:
        rule = ScaledRates(rule=rule, factor=FLAGS.norm_bias_rate_factor)
    if FLAGS.lookahead_every is not None:
        rule = Lookahead(rule=rule, num_updates=num_steps, every=FLAGS.lookahead_every)
    return rule


def schedule_from_flags(num_steps: int) -> Schedule:
    """The schedule over `num_steps`, warmed up."""
    peak = _DEFAULT_RATES[FLAGS.optimizer] if FLAGS.learning_rate is None else FLAGS.learning_rate
    makers: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: Constant(peak),
        "piecewise": lambda: _piecewise(peak),
        "cosine": lambda: Cosine(peak, num_steps),
        "one_cycle": lambda: OneCycle(peak, num_steps),
        "triangular": lambda: Triangular(peak, num_steps),
    }
    schedule = makers[FLAGS.schedule]()
    return WarmUp(schedule, FLAGS.warmup_steps) if FLAGS.warmup_steps else schedule


def _piecewise(peak: float) -> Piecewise:
    try:
        boundaries = tuple(int(word) for word in FLAGS.boundaries)
    except ValueError:
        raise UserError(
            f"--boundaries={','.join(FLAGS.boundaries)}: give steps with commas between them"
        ) from None
    return Piecewise(boundaries, tuple(peak * FLAGS.decay_factor**place for place in range(len(boundaries) + 1)))
