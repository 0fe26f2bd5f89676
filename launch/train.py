"""Trains a built-in task.

    python -m launch.train
        draws the data set 'shapes', trains on it for about a minute on two cores, and prints the paths of the
        checkpoint, the exported model, the metrics and the TensorBoard logs

    python -m launch.train --task=cifar10 --data_dir=DIR --model=resnet20 --epochs=10

    python -m launch.train --verify ...
        takes twenty steps with the chosen strategy and on one device, and prints the largest differences

Exit codes: launch/binary.py.
"""

from launch import binary, training
from launch.flags.task import task_from_flags


def main(_) -> int:
    training.serve_if_server()
    strategy = training.build_strategy(task_from_flags())
    training.build_trainer(strategy).fit()
    return binary.DONE


def cli() -> None:
    """Console script."""
    binary.run(main)


if __name__ == "__main__":
    cli()
