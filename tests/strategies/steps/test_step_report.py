"""Reports of steps."""

import math

import pytest

from tests.strategies.small_task import small_strategy


@pytest.mark.parametrize("before", [0, 2])
def test_a_report_of_no_steps(before):
    strategy = small_strategy()
    if before:
        strategy.run_steps(before)
    report = strategy.run_steps(0)
    assert (report.step, report.num_steps, report.examples, report.skipped) == (before, 0, 0, 0)
    assert math.isnan(report.loss) and math.isnan(report.gradient_norm)
    assert report.metrics == {}
    assert report.learning_rate == strategy.options.schedule(max(before - 1, 0))
    assert strategy.run_steps(1).step == before + 1
