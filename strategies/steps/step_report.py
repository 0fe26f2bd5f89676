"""The report of several steps, from their outcomes."""

import numpy as np

from strategies.contract import StepReport


def report_of(outcomes, *, step, learning_rate, seconds, input_seconds) -> StepReport:
    """One report of the outcomes of steps, perhaps none; the means omit steps that were not finite."""
    finite = [outcome for outcome in outcomes if outcome.finite]
    weight = sum(float(outcome.weight) for outcome in finite)
    totals: dict[str, np.ndarray] = {}
    for outcome in finite:
        for name, value in outcome.metric_sums.items():
            totals[name] = totals.get(name, 0.0) + np.array([float(value.total), float(value.weight)])
    return StepReport(
        step=step,
        num_steps=len(outcomes),
        examples=sum(int(outcome.examples) for outcome in outcomes),
        loss=mean_of(sum(float(outcome.loss_sum) for outcome in finite), weight),
        metrics={name: mean_of(total, weight) for name, (total, weight) in totals.items()},
        learning_rate=learning_rate,
        gradient_norm=float(outcomes[-1].gradient_norm) if outcomes else float("nan"),
        skipped=len(outcomes) - len(finite),
        seconds=seconds,
        input_seconds=input_seconds,
    )


def mean_of(total: float, weight: float) -> float:
    """total / weight; nan if weight is 0."""
    return float(total / weight) if weight else float("nan")
