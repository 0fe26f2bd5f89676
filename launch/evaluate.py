"""Evaluates the newest checkpoint of a run.

    python -m launch.evaluate --directory=runs/NAME
        evaluation of step 395: loss 0.0412, accuracy 0.9880

The program uses the flags of the run. Flags on the command line override them, also those of devices. It needs no
cluster, also for a run that several processes trained.

    python -m launch.evaluate --directory=runs/NAME --strategy=towers --num_towers=1
        evaluates a run of slices on one device

    python -m launch.evaluate --directory=runs/NAME --grid=data:2,slice:4
        evaluates it on eight
"""

from absl import flags

from launch import binary, training
from launch.flags.saved_flags import load_flags
from launch.flags.task import task_from_flags
from strategies.registry import cluster_kind, strategy_names
from strategies.reports.strict_json import dumps
from strategies.training.trainer import Trainer
from towers.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_bool("json", False, "Print the step and the metrics as one JSON object.")
_OF_SERVERS = [name for name in strategy_names() if cluster_kind(name) == "servers"]
flags.register_validator(
    "strategy",
    lambda name: name not in _OF_SERVERS,
    message="no parameter servers are needed to read a checkpoint: omit --strategy",
)


def load_run() -> None:
    """Sets the flags of the run in --directory; those on the command line override them.

    Raises:
      UserError: as `load_flags`, or a flag forbids reading a checkpoint.
    """
    load_flags(FLAGS.directory)
    for name, value in (
        ("dry_run", FLAGS.dry_run),
        ("verify", FLAGS.verify),
        ("resume=never", FLAGS.resume == "never"),
    ):
        if value:
            raise UserError(f"--{name} reads no checkpoint, but this program needs one: omit it")


def restored_trainer() -> Trainer:
    """A Trainer for the run in --directory, restored from its newest checkpoint or from the one of --resume.

    Raises:
      UserError: the run has no checkpoint.
    """
    trainer = training.build_trainer(training.build_strategy(task_from_flags()))
    if trainer.restore() is None:
        raise UserError(f"--directory={FLAGS.directory} has no checkpoint yet: train first")
    return trainer


def main(_) -> int:
    trainer = restored_trainer()
    found = dict(trainer.evaluate())
    step = trainer.strategy.step
    if not trainer.strategy.keeps_files:
        return binary.DONE
    if FLAGS.json:
        print(dumps({"step": step, **found}))
    else:
        print(f"evaluation of step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    return binary.DONE


def cli() -> None:
    """Console script."""
    binary.run(main, trains=False, after_parsing=load_run)


if __name__ == "__main__":
    cli()
