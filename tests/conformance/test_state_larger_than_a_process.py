"""A smaller trial of `state_larger_than_a_process`: one process is killed; the cluster trains and resumes."""

import signal

import pytest

from launch.binary import INTERRUPTED
from tests.conformance import state_larger_than_a_process as program
from tests.towers.control_group_files import real_memory_group

pytestmark = [pytest.mark.timeout(400), pytest.mark.full]


def test_processes_that_are_held_to_less_than_the_state_train_it_and_resume(tmp_path):
    with real_memory_group(2**30):
        """Skips where no control group can be made."""
    with program.nursery() as nursery:
        check(
            program.Trial(
                state_bytes=3 * 2**28,
                limit_bytes=900 * 2**20,
                servers=2,
                directory=tmp_path / "run",
                nursery=nursery,
                timeout_seconds=120,
            )
        )


def check(trial: program.Trial) -> None:
    killed = program.alone(trial)
    assert killed.code == -signal.SIGKILL, killed.output
    first, ends = program.together(trial)
    assert {name: end.code for name, end in ends.items()} == dict.fromkeys(ends, INTERRUPTED), ends
    assert first >= 5
    assert program.saved_bytes(trial) > trial.state_bytes
    second, ends = program.together(trial, after_step=first)
    assert second > first
    assert f"resumed at step {first}" in ends["chief:0"].output
    assert {name: end.code for name, end in ends.items()} == dict.fromkeys(ends, INTERRUPTED), ends
