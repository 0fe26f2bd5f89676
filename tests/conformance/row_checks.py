"""The checks of every row: after 20 steps on every task it gives the numbers of one device."""

import functools
from collections.abc import Sequence

import numpy as np
import pytest

from strategies.servers.report_section import SECTION
from tests import tiers
from tests.conformance.ring_rows import outcomes_by_rank
from tests.conformance.rows import Row, one_device, one_device_in_parts
from tests.conformance.server_rows import outcomes_at_the_chief
from tests.conformance.tasks import SmallTask
from tests.conformance.trials import (
    FIRST_PARTS_STATISTICS,
    NUM_STEPS,
    QUICK_TASK,
    RATE,
    Outcome,
    Trial,
    has_several_parts,
    not_finite,
    outcomes_of,
    policies_to_try,
    tasks_of,
    twenty_steps,
)

# Largest relative difference of a variable. In float64, rounding errors are a thousand times smaller.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


def reference_of(row: Row, task: SmallTask) -> Outcome:
    """The outcome of one device: undivided batches, or the same parts if each part has its own statistics."""
    in_parts = row.shares if task.batch_norm and row.batch_stats != "synced" else ()
    microbatches = row.reference.microbatches_for(task.batch_norm)
    return outcome_of_reference(task, microbatches, in_parts, row.options)


@functools.cache
def outcome_of_reference(
    task: SmallTask, microbatches: int, in_parts: tuple[float, ...], options: tuple[tuple[str, object], ...] = ()
) -> Outcome:
    strategy, policy = (one_device_in_parts(in_parts), "average") if in_parts else (one_device, "synced")
    return outcomes_of(strategy, twenty_steps(task, policy, options), microbatches)[-1]


def outcomes_of_row(row: Row, trial: Trial) -> list[Outcome]:
    """The outcomes of a trial. The processes of a row run once, for all trials of this run of pytest."""
    only_quick = not tiers.runs_full
    if row.ring is not None:
        return outcomes_by_rank(row, only_quick)[0][trial]
    if row.servers is not None:
        return outcomes_at_the_chief(row, only_quick)[trial]
    return outcomes_of(row.make_strategy, trial, row.accumulation)


def _case(row: Row, *values, is_quick: bool, name: str):
    return pytest.param(row, *values, marks=[] if is_quick else [pytest.mark.full], id=name)


def cases_of(rows: Sequence[Row]):
    """A case for each row."""
    return [_case(row, is_quick=row.in_quick, name=row.name) for row in rows]


def row_checks(rows: Sequence[Row]) -> type:
    """A class with the tests of some rows.

    Each kind of row has its own test file, because pytest's two processes divide the tests by file.
    """
    cases = [
        _case(row, task, is_quick=row.in_quick and task == QUICK_TASK, name=f"{row.name}-{task.name}")
        for row in rows
        for task in tasks_of(row)
    ]
    several_trials = [row for row in rows if row.every_trial]
    not_finite_cases = [
        _case(
            row,
            policy,
            is_quick=row.not_finite_in_quick and policy == row.batch_stats,
            name=f"{policy}-{row.name}",
        )
        for row in several_trials
        for policy in policies_to_try(row)
    ]
    first_part_cases = [
        _case(row, is_quick=False, name=row.name) for row in several_trials if has_several_parts(row)
    ]

    class RowChecks:
        @pytest.mark.parametrize("row, task", cases)
        def test_row_equals_one_device(self, row, task):
            check_row(row, task)

        @pytest.mark.parametrize("row", first_part_cases)
        def test_statistics_of_the_first_part(self, row):
            check_end_in_parts(row, FIRST_PARTS_STATISTICS)

        @pytest.mark.parametrize("row, batch_stats", not_finite_cases)
        def test_a_step_that_is_not_finite_changes_nothing(self, row, batch_stats):
            check_not_finite(row, not_finite(batch_stats))

    return RowChecks


def apart(values, expected, tolerance: float) -> dict[str, float]:
    """max|a - b| / max|b| of the variables for which it exceeds the tolerance or is NaN."""
    differences = {name: np.abs(values[name] - b).max() / np.abs(b).max() for name, b in expected.items()}
    return {name: float(difference) for name, difference in differences.items() if not difference <= tolerance}


def check_row(row: Row, task: SmallTask) -> None:
    outcome, expected = (
        outcomes_of_row(row, twenty_steps(task, row.batch_stats, row.options))[-1],
        reference_of(row, task),
    )
    tolerance = TOLERANCE[task.precision]
    assert outcome.values.keys() == expected.values.keys()
    assert apart(outcome.values, expected.values, tolerance) == {}
    assert outcome.step == NUM_STEPS
    assert {name: outcome.counters[name] for name in ("step", "updates", "skipped")} == {
        "step": NUM_STEPS,
        "updates": NUM_STEPS,
        "skipped": 0,
    }
    check_report(outcome.report, expected.report, task)
    if row.late_seconds:
        taken_over = [worker.taken_over for worker in outcome.report.sections[SECTION].workers]
        assert sum(taken_over) > 0, "or the row shows nothing"
    check_evaluation(outcome.evaluation, expected.evaluation, task)


def check_report(report, expected, task):
    """Reported numbers are float32 sums, whatever the layers compute in."""
    count = task.num_examples("train")
    batches = [min(30, count - start) for start in range(0, count, 30)]
    assert report.examples == sum(batches[step % len(batches)] for step in range(NUM_STEPS))
    assert (report.step, report.num_steps, report.skipped) == (NUM_STEPS, NUM_STEPS, 0)
    assert report.learning_rate == RATE
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
    assert report.metrics == pytest.approx(expected.metrics, rel=1e-6)


def check_evaluation(evaluation, expected, task):
    assert evaluation["total_examples"] == task.num_examples("eval")
    assert evaluation["total_weight"] == expected["total_weight"] == task.total_weight("eval")
    assert evaluation["accuracy"] == expected["accuracy"]
    assert evaluation["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def check_end_in_parts(row: Row, trial: Trial) -> None:
    """Each part has its own statistics, so the reference computes the same parts."""
    *_, found = outcomes_of_row(row, trial)
    *_, expected = outcomes_of(one_device_in_parts(row.shares), trial, row.accumulation)
    assert apart(found.values, expected.values, TOLERANCE[trial.task.precision]) == {}


def check_not_finite(row: Row, trial: Trial) -> None:
    before, skipped, after = outcomes_of_row(row, trial)
    assert [outcome.report.skipped for outcome in (before, skipped, after)] == [0, 1, 0]
    for name, value in skipped.values.items():
        np.testing.assert_array_equal(value, before.values[name], err_msg=name)
    assert all(np.isfinite(value).all() for value in after.values.values())
    counters = after.counters
    assert (counters["step"], counters["updates"], counters["skipped"]) == (3, 2, 1)
    if trial.batch_stats != "synced":
        check_end_in_parts(row, trial)
