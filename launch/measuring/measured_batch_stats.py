"""Measures towers with statistics of the whole batch and of their own parts, alternately in one process.

On a shared machine the rate of either kind differs by a third between processes, by more than the two kinds differ
from each other.
"""

import statistics
import time

from absl import flags

from launch import training
from launch.measuring.measured_program import measured_task
from strategies.contract import Strategy

FLAGS = flags.FLAGS
_POLICIES = ("average", "synced")
# The first step traces and compiles.
_WARM_UP_STEPS = 3


def measure_batch_stats() -> dict:
    """Both rates in images/s; the ratios synced / average of rate and CPU time, medians over pairs of steps."""
    FLAGS.steps = _WARM_UP_STEPS + FLAGS.measured_steps
    strategies = {policy: _strategy(policy) for policy in _POLICIES}
    seconds: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    cpu_seconds: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    for _ in range(FLAGS.measured_steps):
        for policy, strategy in strategies.items():
            cpu_began, began = time.process_time(), time.perf_counter()
            strategy.run_steps(1)
            seconds[policy].append(time.perf_counter() - began)
            cpu_seconds[policy].append(time.process_time() - cpu_began)
    rates = {policy: FLAGS.measured_batch / statistics.median(found) for policy, found in seconds.items()}
    return {
        **{f"{policy}_images_per_second": rate for policy, rate in rates.items()},
        "synced_rate": 1 / _median_ratio(seconds),
        "synced_cpu_time": _median_ratio(cpu_seconds),
    }


def _strategy(policy: str) -> Strategy:
    FLAGS.batch_stats = policy
    strategy = training.build_strategy(measured_task())
    strategy.run_steps(_WARM_UP_STEPS)
    return strategy


def _median_ratio(found: dict[str, list[float]]) -> float:
    """The median of synced / average over the pairs of steps."""
    average, synced = (found[policy] for policy in _POLICIES)
    return statistics.median(b / a for a, b in zip(average, synced, strict=True))
