"""Compares 20 steps on GPUs with the same steps on CPUs, and steps reported late with awaited steps."""

import numpy as np
import tensorflow as tf

from tests.gpu.fresh_process import towers
from tests.gpu.modes import strategy_of
from tests.towers.logical_cpus import cpus

STEPS = 20
# (precision, steps, largest relative difference); a loss is in float32. Adam on batch norms of two examples
# enlarges the rounding of float32: a change of 3e-7 in the initial weights becomes 6e-3 in the loss in 20 steps.
COMPARED = (("float64", 20, 5e-7), ("float32", 3, 1e-3))
# XLA rounds differently where images are prepared: there in float32, whatever the precision.
LEAST = {"xla": 1e-4}
TOLERANCE = 2e-3


def several_steps(mode: str) -> None:
    """As `beside_cpu`, with four steps in an execution; not deterministic: a graph then has no clock."""
    beside_cpu(mode, steps_per_execution=4)


def beside_cpu(mode: str, **given) -> None:
    """Loss, evaluation and parameters after some steps agree within the tolerance of each precision."""
    for precision, steps, tolerance in COMPARED:
        found, expected = (
            _trained(strategy_of(mode, devices, precision, **given), steps) for devices in (towers(), cpus(2))
        )
        for name, value in found.items():
            difference = np.linalg.norm(value - expected[name]) / max(np.linalg.norm(expected[name]), 1e-6)
            print(f"{mode}: {precision}: {name}: relative difference {difference:.2e}")
            assert difference < max(tolerance, LEAST.get(mode, 0.0)), (precision, name)


def late_reports(mode: str) -> None:
    """Late reports come one call later and equal those of awaited steps; prints the seconds of both runs."""
    awaited, started = (strategy_of(mode, towers(masks=True)) for _ in range(2))
    expected = [awaited.run_steps(1) for _ in range(STEPS)]
    before, *found = [*(started.start_steps(1) for _ in range(STEPS)), started.settle()]
    assert before is None and started.settle() is None
    assert [report.step for report in found] == [report.step for report in expected]
    np.testing.assert_allclose([one.loss for one in found], [one.loss for one in expected], rtol=TOLERANCE)
    # Without the first steps, which trace and choose kernels.
    seconds = [sum(report.seconds for report in reports[5:]) for reports in (expected, found)]
    print(f"{mode}: seconds of {STEPS - 5} steps: awaited {seconds[0]:.4f}, reported late {seconds[1]:.4f}")


def _trained(strategy, steps: int) -> dict[str, np.ndarray]:
    loss = strategy.run_steps(steps).loss
    parameters = strategy.checkpointables()["parameters"].values()
    values = [tf.convert_to_tensor(value).numpy().ravel() for value in parameters]
    return {
        "loss": np.array(loss),
        "evaluation loss": np.array(strategy.evaluate()["loss"]),
        "parameters": np.concatenate(values),
    }
