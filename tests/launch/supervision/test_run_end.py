"""What a run prints at its end."""

import pytest

from launch.supervision.run_end import print_results
from strategies.training.trainer import FitResult


@pytest.mark.parametrize("skipped", [0, 1200])
def test_skipped_steps_are_printed(skipped, capsys):
    summary = {"images_per_second": None, "straggler": None, "skipped_steps": skipped}
    print_results(
        FitResult(
            completed=True,
            step=2000,
            loss=0.5,
            evaluation=None,
            evaluated_step=None,
            summary=summary,
            tables=(),
            files={},
        )
    )
    expected = "skipped: 1,200 steps of this run were not finite and changed no parameter\n" if skipped else ""
    assert capsys.readouterr().out == expected
