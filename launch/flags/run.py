"""Flags of a run: how long, what is kept, what is reported."""

import datetime
import os
import pathlib

from absl import flags

from launch.flags.checks import listed_in_help, positive
from strategies.callbacks import Callback
from strategies.reports.profiler import Profiler
from strategies.reports.progress_display import ProgressDisplay
from strategies.training.trainer_options import TrainerOptions
from towers.errors import UserError
from towers.precision import PRECISIONS

FLAGS = flags.FLAGS
_RUN_DIRECTORY_VARIABLE = "TOWERS_RUN_DIRECTORY"

flags.DEFINE_integer("steps", None, "Steps to train; this or --epochs.")
flags.DEFINE_float("epochs", None, "Passes over the training examples; default: 4.")
flags.DEFINE_string("directory", None, "Where everything is kept; default: a new one under runs/.")
flags.DEFINE_string("resume", "auto", "auto: from --directory's newest checkpoint; never; or a checkpoint's path.")
flags.DEFINE_float("checkpoint_every_seconds", 300.0, "Time between checkpoints.")
flags.DEFINE_integer("checkpoint_every_steps", None, "Steps between checkpoints, beside the time.")
flags.DEFINE_integer("keep_checkpoints", 3, "Checkpoints that stay.")
flags.DEFINE_float("evaluate_every_epochs", 1.0, "Passes between evaluations; there is always one at the end.")
flags.DEFINE_integer("evaluate_every_steps", None, "Steps between evaluations.")
flags.DEFINE_integer("report_every_steps", None, "Steps between reports; default: about half a second's worth.")
flags.DEFINE_string("profile_steps", None, "FIRST:LAST: TensorFlow's profiler over these steps.")
flags.DEFINE_bool("dry_run", False, "Two steps and one evaluation, nothing kept.")
flags.DEFINE_bool("verify", False, "Twenty steps beside one device on the same batches, then stop.")
flags.DEFINE_enum("verify_precision", "float64", PRECISIONS, "What layers compute in under --verify.")
flags.DEFINE_float("verify_tolerance", 1e-5, "Largest relative difference that --verify accepts.")
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
listed_in_help(__name__)

DEFAULT_EPOCHS = 4.0


def trainer_options_from_flags(directory: str | None) -> TrainerOptions:
    """How the run goes on, kept in `directory`.

    Raises:
      UserError: both --steps and --epochs.
    """
    if FLAGS.steps is not None and FLAGS.epochs is not None:
        raise UserError(f"--steps={FLAGS.steps} and --epochs={FLAGS.epochs:g}: give one of them")
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


def run_directory() -> pathlib.Path:
    """The run's directory; every call in one process returns the same.

    --directory, else the variable TOWERS_RUN_DIRECTORY, which a launcher sets to the same folder in all the
    processes that it starts, else a new runs/DATE-TIME-PROCESS.
    """
    if FLAGS.directory is None:
        FLAGS.directory = os.environ.get(_RUN_DIRECTORY_VARIABLE) or None
    if FLAGS.directory is None:
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        FLAGS.directory = os.path.join("runs", f"{started}-{os.getpid()}")
    return pathlib.Path(FLAGS.directory)


def callbacks_from_flags() -> list[Callback]:
    """The display, and the profiler where it was asked for."""
    callbacks: list[Callback] = [ProgressDisplay()]
    if FLAGS.profile_steps is not None:
        first, separator, last = FLAGS.profile_steps.partition(":")
        if not (separator and first.isdecimal() and last.isdecimal()):
            raise UserError(f"--profile_steps={FLAGS.profile_steps}: give FIRST:LAST, as 10:20")
        callbacks.append(Profiler(int(first), int(last)))
    return callbacks
