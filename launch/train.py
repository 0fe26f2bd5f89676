"""Trains a built-in task.

    python -m launch.train
        draws the data set 'shapes', trains on it for about a minute on two cores, and prints the paths of the
        checkpoint, the exported model, the metrics and the TensorBoard logs

    python -m launch.train --task=cifar10 --data_dir=DIR --model=resnet20 --epochs=10

    python -m launch.train --verify ...
        takes twenty steps with the chosen strategy and on one device, and prints the largest differences

Exit codes: launch/binary.py.
"""

import dataclasses

from absl import flags

from launch import binary, training
from launch.flags import step
from launch.flags.saved_flags import save_flags
from launch.flags.task import task_from_flags
from launch.supervision.signals import StopSignals
from strategies.one_device_reference import reference_strategy
from strategies.training.verification import differences

FLAGS = flags.FLAGS
VERIFY_STEPS = 20
_SHOWN_DIFFERENCES = 5


def main(_) -> int:
    if not FLAGS.verify:
        training.serve_if_server()
    task = task_from_flags()
    return verify(task) if FLAGS.verify else train(task)


def train(task) -> int:
    """Trains as the flags describe; returns the exit code."""
    strategy = training.build_strategy(task)
    with StopSignals() as signals:
        trainer = training.build_trainer(strategy, stop_requested=signals.requested)
        trainer.prepare()
        if trainer.directory is not None:
            save_flags(trainer.directory)
        result = trainer.fit()
        if not result.completed:
            signals.ignore_sigterm_afterwards()
        if strategy.keeps_files:
            report(result)
            if not result.completed:
                print(f"{signals.name}: stopped at step {result.step}" + how_to_resume(trainer.directory))
    return binary.DONE if result.completed else binary.INTERRUPTED


def report(result) -> None:
    """Prints the results of the run for a person."""
    if result.evaluation is not None:
        written = ", ".join(f"{name} {value:.4f}" for name, value in result.evaluation.items())
        print(f"step {result.step}: evaluation {written}")
    if result.summary["images_per_second"]:
        print(f"speed: {result.summary['images_per_second']:,.0f} examples/s, steady median")
    straggler = result.summary["straggler"]
    if straggler is not None:
        times = straggler["times_the_others"]
        print(
            f"straggler: {straggler['name']} takes {times:.1f} times as long as the other workers, which wait "
            "for it"
        )
    for line in result.tables:
        print(line)
    for what, path in result.files.items():
        print(f"{what}: {path}")


def how_to_resume(directory) -> str:
    """What to type to resume; empty for a dry run, which saves nothing."""
    if directory is None:
        return ""
    return f"; to resume, run the same command with --directory={directory} --resume=auto"


def verify(task) -> int:
    """Compares twenty steps with one device; prints the largest relative differences; returns the exit code.

    The default precision is float64. In float32 a sum in another order moves some activation across a ReLU's
    corner at nearly every step of a large network, so that two correct runs drift apart.
    """
    options = step.options_from_flags(training.run_length(task))
    strategy = training.build_strategy(task, dataclasses.replace(options, precision=FLAGS.verify_precision))
    reference, how = reference_strategy(task, strategy, strategy.options)
    found = differences(strategy, reference, VERIFY_STEPS)
    strategy.finish(completed=True)
    largest = found[0].relative
    good = largest <= FLAGS.verify_tolerance
    if strategy.keeps_files:
        print(f"{strategy.name} with {strategy.num_towers} towers compared with {how}, {VERIFY_STEPS} steps:")
        for difference in found[:_SHOWN_DIFFERENCES]:
            print(f"  {difference.relative:.2e}  {difference.kind}/{difference.name}")
        print(
            f"{'verified' if good else 'DIFFERS'}: largest {largest:.2e}, tolerance {FLAGS.verify_tolerance:.0e}"
        )
    return binary.DONE if good else binary.DIFFERS


def cli() -> None:
    """Console script."""
    binary.run(main)


if __name__ == "__main__":
    cli()
