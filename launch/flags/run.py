"""Flags of a run: its length, its directory, checkpoints, evaluations and reports."""

import datetime
import os
import pathlib

from absl import flags

from launch.flags.belonging import needs
from launch.flags.checks import listed_in_help, positive
from launch.flags.paths import define_path
from launch.messages.in_flags import in_flags
from strategies.callbacks import Callback
from strategies.registry import cluster_kind
from strategies.reports.profiler import Profiler
from strategies.reports.progress_display import ProgressDisplay
from strategies.reports.timeline import TimelineOfSteps
from strategies.training.trainer_options import TrainerOptions
from towers.errors import UserError
from towers.precision import PRECISIONS
from towers.task import Task, steps_per_epoch

FLAGS = flags.FLAGS
_RUN_DIRECTORY_VARIABLE = "TOWERS_RUN_DIRECTORY"

flags.DEFINE_integer(
    "steps", None, "Training ends at this step, counted from the start of the first run. Excludes --epochs."
)
flags.DEFINE_float(
    "epochs",
    None,
    "Training ends after this many passes over the training set. Default: 4. Excludes --steps.",
)
define_path(
    "directory",
    None,
    "Directory for checkpoints, logs and the exported model. Default: a new runs/DATE-TIME-PROCESS.",
)
define_path(
    "resume",
    "auto",
    "Checkpoint to resume from. auto: the newest in --directory, if there is any. never: start at step 0 and set "
    "aside the earlier run in --directory. Otherwise: path of a checkpoint or of a directory of checkpoints.",
)
flags.DEFINE_float(
    "checkpoint_every_seconds", 300.0, "Seconds between checkpoints. The end of a run is always saved."
)
flags.DEFINE_integer(
    "checkpoint_every_steps", None, "Steps between checkpoints, in addition to --checkpoint_every_seconds."
)
flags.DEFINE_integer("keep_checkpoints", 3, "Number of newest checkpoints to keep; older ones are deleted.")
flags.DEFINE_float(
    "evaluate_every_epochs",
    1.0,
    "Passes over the training examples between evaluations. A run always ends with an evaluation.",
)
flags.DEFINE_integer(
    "evaluate_every_steps", None, "Steps between evaluations, in addition to --evaluate_every_epochs."
)
flags.DEFINE_integer(
    "report_every_steps", None, "Steps between progress reports. Default: as many as take about half a second."
)
flags.DEFINE_string(
    "profile_steps",
    None,
    "FIRST:LAST, as 10:20: run TensorFlow's profiler from step FIRST up to, not including, step LAST, and write "
    "to profile/ in the run's directory.",
)
flags.DEFINE_string(
    "timeline_steps",
    None,
    "FIRST:LAST, as 10:13: draw what each device did when from step FIRST up to, not including, step LAST. Writes "
    "timeline.png and timeline.json (for chrome://tracing and ui.perfetto.dev) to the run's directory, and prints "
    "the bubble of a pipeline. In a ring only worker 0 is drawn. Excludes --profile_steps.",
)
flags.DEFINE_bool("dry_run", False, "Train two steps, evaluate once and write no files.")
flags.DEFINE_bool(
    "verify",
    False,
    "Do not train, but check the strategy: take twenty steps with it and with one device on the same batches, and "
    "print the largest relative differences.",
)
flags.DEFINE_enum(
    "verify_precision",
    "float64",
    PRECISIONS,
    "Number format of the layers' computation during --verify. In float32 two correct runs drift apart.",
)
flags.DEFINE_float(
    "verify_tolerance", 1e-5, "Largest relative difference for --verify to succeed; above it the exit code is 3."
)
positive(
    "steps",
    "epochs",
    "checkpoint_every_seconds",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "evaluate_every_epochs",
    "evaluate_every_steps",
    "report_every_steps",
    "verify_tolerance",
)
needs(
    lambda: "" if FLAGS.verify else "without --verify, which alone uses it: use --verify",
    *("verify_precision", "verify_tolerance"),
)
listed_in_help(__name__)

DEFAULT_EPOCHS = 4.0


def trainer_options_from_flags(directory: str | None) -> TrainerOptions:
    """Length, directory and intervals of the run; if `directory` is None, nothing is saved.

    Raises:
      UserError: --steps and --epochs are both set.
    """
    if FLAGS.steps is not None and FLAGS.epochs is not None:
        raise UserError(
            f"--steps={FLAGS.steps} and --epochs={FLAGS.epochs:g}: they exclude each other; give only one of them"
        )
    epochs = FLAGS.epochs if FLAGS.epochs is not None else DEFAULT_EPOCHS
    return TrainerOptions(
        steps=FLAGS.steps,
        epochs=None if FLAGS.steps is not None else epochs,
        directory=directory,
        resume=FLAGS.resume,
        checkpoint_every_seconds=FLAGS.checkpoint_every_seconds,
        checkpoint_every_steps=FLAGS.checkpoint_every_steps,
        keep_checkpoints=FLAGS.keep_checkpoints,
        evaluate_every_epochs=FLAGS.evaluate_every_epochs,
        evaluate_every_steps=FLAGS.evaluate_every_steps,
        report_every_steps=FLAGS.report_every_steps,
        dry_run=FLAGS.dry_run,
    )


def run_length(task: Task) -> int:
    """Number of steps of the whole run, which the schedule covers."""
    return trainer_options_from_flags(None).num_steps(steps_per_epoch(task))


def known_directory() -> pathlib.Path | None:
    """The directory that the user or a launcher gave to this run; None if `run_directory` will make one."""
    given = FLAGS.directory or os.environ.get(_RUN_DIRECTORY_VARIABLE)
    return pathlib.Path(given) if given else None


def run_directory() -> pathlib.Path:
    """The run's directory; every call in one process returns the same.

    --directory, else the variable TOWERS_RUN_DIRECTORY, which a launcher sets to the same folder in all the
    processes that it starts, else a new runs/DATE-TIME-PROCESS.
    """
    # An empty --directory counts as not given, as in `known_directory`: $DIR may be unset.
    if not FLAGS.directory:
        FLAGS.directory = os.environ.get(_RUN_DIRECTORY_VARIABLE) or None
    if not FLAGS.directory:
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        FLAGS.directory = os.path.join("runs", f"{started}-{os.getpid()}")
    return pathlib.Path(FLAGS.directory)


def callbacks_from_flags() -> list[Callback]:
    """The progress display, and the callbacks of --profile_steps and --timeline_steps."""
    display = ProgressDisplay(worded=in_flags)
    callbacks: list[Callback] = [display]
    if FLAGS.profile_steps is not None:
        callbacks.append(Profiler(*_range_of("profile_steps")))
    if FLAGS.timeline_steps is not None:
        callbacks.append(TimelineOfSteps(*_range_of("timeline_steps"), say=display.message))
    return callbacks


def _range_of(name: str) -> tuple[int, int]:
    first, separator, last = FLAGS[name].value.partition(":")
    if not (separator and first.isdecimal() and last.isdecimal()):
        raise UserError(f"--{name}={FLAGS[name].value}: give FIRST:LAST, as 10:20")
    return int(first), int(last)


def check_timeline() -> None:
    """Raises UserError, in all processes of a run, if --timeline_steps can't be combined with the other flags."""
    if FLAGS.timeline_steps is None:
        return
    given = f"--timeline_steps={FLAGS.timeline_steps}"
    if FLAGS.profile_steps is not None:
        raise UserError(
            f"{given} and --profile_steps={FLAGS.profile_steps}: both use TensorFlow's profiler, which runs once "
            "at a time; give only one of them"
        )
    if cluster_kind(FLAGS.strategy) == "servers":
        raise UserError(
            f"{given} with --strategy={FLAGS.strategy}: its chief, which writes the run's files, computes no "
            "step; use another strategy, or omit --timeline_steps"
        )
