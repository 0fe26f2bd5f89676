"""--verify: trains a few steps in the chosen mode and on one device, and compares."""

from absl import flags

from launch import binary
from strategies.contract import Strategy
from strategies.one_device_reference import reference_strategy
from strategies.training.verification import differences
from towers.task import Task

FLAGS = flags.FLAGS
STEPS = 20
_SHOWN_DIFFERENCES = 5


def verify(task: Task, strategy: Strategy) -> int:
    """Compares twenty steps with one device's; prints the largest relative differences; returns the exit code.

    Args:
      task: what to train.
      strategy: the chosen strategy at step 0, in the precision of --verify_precision. Its default is float64: in
        float32 a sum in another order moves some activation across a ReLU's corner at nearly every step of a
        large network, so that two correct runs drift apart.
    """
    reference, how = reference_strategy(task, strategy, strategy.options)
    found = differences(strategy, reference, STEPS)
    strategy.finish(completed=True)
    # With ZeRO 3 over workers a process may have no whole variable to compare; the one with the files has all.
    largest = found[0].relative if found else 0.0
    good = largest <= FLAGS.verify_tolerance
    if strategy.keeps_files:
        towers = f"{strategy.num_towers} tower{'' if strategy.num_towers == 1 else 's'}"
        print(f"{strategy.name} with {towers} compared with {how}, {STEPS} steps in {FLAGS.verify_precision}:")
        for difference in found[:_SHOWN_DIFFERENCES]:
            print(f"  {difference.relative:.2e}  {difference.kind}/{difference.name}")
        print(
            f"{'verified' if good else 'DIFFERS'}: largest {largest:.2e}, tolerance {FLAGS.verify_tolerance:.0e}"
        )
    return binary.DONE if good else binary.DIFFERS
