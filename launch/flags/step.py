"""Flags of a training step: optimizer, schedule, clipping, precision."""

from collections.abc import Callable

from absl import flags

from launch.flags.belonging import needs, serves
from launch.flags.checks import at_least_zero, listed_in_help, positive
from towers.batch_stats import POLICIES
from towers.errors import UserError
from towers.options import ON_NAN, StepOptions
from towers.precision import PRECISIONS
from towers.recompute.segments import POLICIES as RECOMPUTE_POLICIES
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
# Peak rates and decays that suit the built-in networks, which have batch norm, with batches of about 128 examples.
_DEFAULT_RATES = {"sgd": 0.2, "momentum": 0.05, "nesterov": 0.05, "adam": 2e-3, "adamw": 2e-3, "muon": 0.02}
_DEFAULT_DECAYS = {"sgd": 0.0, "momentum": 5e-3, "nesterov": 5e-3, "adam": 0.0, "adamw": 5e-3, "muon": 0.015}


def _weight_decay() -> float:
    return _DEFAULT_DECAYS[FLAGS.optimizer] if FLAGS.weight_decay is None else FLAGS.weight_decay


def _no_decay() -> str:
    """Why --decay_all has no effect; '' if it has one."""
    if _weight_decay():
        return ""
    decider = f"optimizer={FLAGS.optimizer}" if FLAGS.weight_decay is None else "weight_decay=0"
    return f"with --{decider}: no weight decays; give for example --weight_decay=0.005"


flags.DEFINE_enum(
    "optimizer", "nesterov", tuple(_RULES), "Update rule. nesterov: SGD with Nesterov momentum. sgd: no momentum."
)
flags.DEFINE_float(
    "learning_rate",
    None,
    "Peak learning rate of the schedule. Default: 0.2 for sgd, 0.05 for momentum and nesterov, 0.002 for adam and "
    "adamw, 0.02 for muon.",
)
flags.DEFINE_enum(
    "schedule",
    "one_cycle",
    ("constant", "piecewise", "cosine", "one_cycle", "triangular"),
    "Learning rate over the run. constant: the peak. piecewise: see --boundaries. cosine: from the peak to 0 "
    "along half a cosine. one_cycle: linear rise over 30% of the steps, then down along a cosine. triangular: "
    "linear rise over 23% of the steps, then linear fall.",
)
flags.DEFINE_integer(
    "warmup_steps",
    0,
    "Number of first steps whose scheduled rate is multiplied by (step + 1) / warmup_steps. 0: no warm-up.",
)
flags.DEFINE_list(
    "boundaries",
    [],
    "For --schedule=piecewise: steps at which the rate is multiplied by --decay_factor, as 1000,2000.",
)
flags.DEFINE_float(
    "decay_factor", 0.1, "For --schedule=piecewise: factor on the learning rate at each of --boundaries."
)
flags.DEFINE_float("momentum", 0.9, "Momentum coefficient, in [0, 1), of --optimizer=momentum, nesterov and muon.")
flags.DEFINE_float("adam_beta_1", 0.9, "Decay rate of the first moment, for --optimizer=adam and adamw.")
flags.DEFINE_float("adam_beta_2", 0.999, "Decay rate of the second moment, for --optimizer=adam and adamw.")
flags.DEFINE_float(
    "weight_decay",
    None,
    "Decoupled weight decay: each step subtracts learning rate * weight_decay * weight. Default: 0.005 for "
    "momentum, nesterov and adamw, 0.015 for muon, 0 for sgd and adam.",
)
flags.DEFINE_bool(
    "decay_all",
    False,
    "Apply weight decay to all parameters, biases and normalisation layers included. Default: only kernels and "
    "embeddings.",
)
flags.DEFINE_float(
    "norm_bias_rate_factor",
    1.0,
    "Factor on the learning rate of the biases (beta) of batch norm and other normalisation layers.",
)
flags.DEFINE_integer(
    "lookahead_every",
    None,
    "Number of updates between steps of Lookahead, which moves the weights to a running average of themselves. "
    "Default: no Lookahead.",
)
flags.DEFINE_float(
    "clip_value",
    None,
    "Clip each element of the averaged gradients to [-clip_value, clip_value]. Excludes the other two --clip "
    "flags. Default: no clipping.",
)
flags.DEFINE_float(
    "clip_norm",
    None,
    "Scale each parameter's averaged gradient down to at most this Euclidean norm. Excludes the other two "
    "--clip flags. Default: no clipping.",
)
flags.DEFINE_float(
    "clip_global_norm",
    None,
    "Scale all averaged gradients down by one factor so that their joint norm is at most this. Excludes the "
    "other two --clip flags. Default: no clipping.",
)
flags.DEFINE_integer(
    "accumulation",
    1,
    "Number of microbatches that each batch is divided into and that run one after another. Raise it if a batch "
    "does not fit into memory.",
)
flags.DEFINE_enum(
    "batch_stats",
    "average",
    POLICIES,
    "Batch-norm statistics with several towers. average: each tower normalises with its own part of the batch, so "
    "the numbers depend on the number of towers; moving statistics are averaged over the towers. first: moving "
    "statistics of the first tower only. synced: towers normalise with the statistics of the whole batch, which "
    "gives one device's numbers for any number of towers.",
)
flags.DEFINE_enum(
    "precision",
    "float32",
    ("auto", *PRECISIONS),
    "Number format of the layers' computation. bfloat16 and float16 are mixed precision with float32 parameters. "
    "auto: bfloat16 on CPUs with AMX, on AMD's CPUs with AVX512-BF16, and on GPUs of compute capability 8.0 or "
    "higher; otherwise float32. A resumed run keeps its precision. All processes of a run need the same one: give "
    "it by name if their devices differ.",
)
flags.DEFINE_bool(
    "xla",
    None,
    "Compile the towers' passes with XLA, on one GPU also the update; the first step takes longer. Not with "
    "--batch_stats=synced. Default: with --strategy=towers on one GPU yes, if XLA can; elsewhere no.",
)
flags.DEFINE_bool(
    "fused_batch_norm",
    True,
    "Run batch norm on TensorFlow's fused kernel instead of Keras's operations.",
)
flags.DEFINE_bool(
    "tuned_for_cpu",
    True,
    "On CPU towers, compile GELU and SiLU, with AVX2 alone or synced statistics also batch norm; choose faster "
    "memory layouts for convolutions over small images; compute 3x3 convolutions of many channels in float32 by "
    "Winograd's method; where the CPU is no faster in --precision, multiply in float32.",
)
flags.DEFINE_enum(
    "recompute",
    "none",
    RECOMPUTE_POLICIES,
    "Activations that the backward pass computes again instead of keeping them: saves memory, and costs up to one "
    "more forward pass. The results are the same. blocks: those within the repeated blocks of the model. full: "
    "within all parts of the model. sqrt: within about sqrt(n) segments of equal size. Not with --xla.",
)
flags.DEFINE_enum(
    "on_nan",
    "stop",
    ON_NAN,
    "Action at a step whose loss or gradient is not finite. stop: end training with exit code 4. skip: omit the "
    "update and continue.",
)
flags.DEFINE_integer("seed", 0, "Random seed for weights, data order, augmentation and dropout.")
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
serves("optimizer", ("momentum", "nesterov", "muon"), "momentum")
serves("optimizer", ("adam", "adamw"), "adam_beta_1", "adam_beta_2")
serves("schedule", ("piecewise",), "boundaries", "decay_factor")
needs(_no_decay, "decay_all")
listed_in_help(__name__)


def options_from_flags(num_steps: int) -> StepOptions:
    """The options of a step. The schedule covers `num_steps`, the length of the run."""
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
        recompute=FLAGS.recompute,
        on_nan=FLAGS.on_nan,
        seed=FLAGS.seed,
    )


def rule_from_flags(num_steps: int) -> UpdateRule:
    """The update rule of --optimizer, wrapped in ScaledRates and Lookahead if their flags are given."""
    rule = _RULES[FLAGS.optimizer](
        weight_decay=_weight_decay(), decays=everything if FLAGS.decay_all else matrices_only
    )
    if FLAGS.norm_bias_rate_factor != 1:
        rule = ScaledRates(rule=rule, factor=FLAGS.norm_bias_rate_factor)
    if FLAGS.lookahead_every is not None:
        rule = Lookahead(rule=rule, num_updates=num_steps, every=FLAGS.lookahead_every)
    return rule


def schedule_from_flags(num_steps: int) -> Schedule:
    """The schedule of --schedule over `num_steps`, with the warm-up of --warmup_steps."""
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
    if not FLAGS.boundaries:
        raise UserError(
            "--schedule=piecewise without --boundaries: the learning rate would never change; give the steps at "
            "which it changes, as --boundaries=1000,2000, or omit --schedule"
        )
    try:
        boundaries = tuple(int(word) for word in FLAGS.boundaries)
    except ValueError:
        raise UserError(
            f"--boundaries={','.join(FLAGS.boundaries)}: give whole numbers of steps separated by commas, as "
            "100,200"
        ) from None
    return Piecewise(boundaries, tuple(peak * FLAGS.decay_factor**index for index in range(len(boundaries) + 1)))
