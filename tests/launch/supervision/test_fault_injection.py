"""Training with a planned fault, and the fault of each kind alone."""

import signal

import pytest

from launch.supervision.fault_injection import Fault, faults_from_environment
from strategies.callbacks import Run
from tests.launch.clusters import launched
from tests.launch.programs import LAST_STEP, TINY, assert_same_end
from towers.errors import UserError

RUN = Run(strategy=None, directory=None, first_step=10, last_step=30)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_ring_that_lost_a_worker_restarts_and_gives_the_results_of_an_undisturbed_one(undisturbed, tmp_path):
    """Without the fault, rank 0 would not end a call of run_steps at this step."""
    command = (
        "python",
        "-m",
        "launch.train",
        *TINY,
        "--num_towers=1",
        "--report_every_steps=7",
        "--strategy=ring",
    )
    flags = ("--workers=2", "--kill=worker:1@step11", "--max_restarts=1")
    with launched(tmp_path, "", *flags, command=command) as cluster:
        done = cluster.ended()
    assert done.code == 0, done.err
    assert "[worker:1] planned fault: SIGKILL before step 11\n" in done.err
    lines = done.out.splitlines()
    [restart] = [line for line in lines if line.startswith("restart ")]
    assert restart.startswith("restart 1 of 1: worker:1 failed: killed by SIGKILL; ")
    assert f"[worker:0] resumed at step 10 of {LAST_STEP}" in lines
    assert lines[-1] == "recovered: worker:1 was killed at step 11, restart 1 completed"
    [directory] = (tmp_path / "runs").iterdir()
    assert (directory / "logs" / "worker-0.log").exists(), "training used the launcher's directory"
    assert_same_end(directory, undisturbed.directory)


@pytest.fixture
def sent(monkeypatch):
    """The signals that this process would have sent to itself."""
    found = []
    monkeypatch.setattr("os.kill", lambda process, number: found.append(number))
    return found


@pytest.mark.parametrize("order, number", [("kill@12", signal.SIGKILL), ("stop@12", signal.SIGSTOP)])
def test_a_fault_happens_before_its_step(sent, monkeypatch, order, number):
    monkeypatch.setenv("TOWERS_FAULT", order)
    [fault] = faults_from_environment()
    fault.check(RUN)
    assert fault.boundaries() == (12,), "a call of run_steps must end there"
    fault.before_steps(11)
    assert sent == []
    fault.before_steps(12)
    assert sent == [number]
    fault.before_steps(13)
    assert sent == [number]


def test_no_fault_is_ordered(monkeypatch):
    monkeypatch.delenv("TOWERS_FAULT", raising=False)
    assert faults_from_environment() == []


@pytest.mark.parametrize("order", ["", "kill", "kill@", "kill@x", "burn@3"])
def test_an_invalid_order(monkeypatch, order):
    monkeypatch.setenv("TOWERS_FAULT", order)
    with pytest.raises(UserError, match=f"TOWERS_FAULT={order}: give a fault and a step"):
        faults_from_environment()


@pytest.mark.parametrize("step", [9, 30])
def test_a_step_that_the_run_does_not_take(step):
    with pytest.raises(
        UserError,
        match=f"a fault is planned at step {step}, but this run takes steps 10 to 29; choose one of these",
    ):
        Fault(signal.SIGKILL, step).check(RUN)
