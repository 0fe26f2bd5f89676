"""ParameterServerStrategy as the engine, with processes that fail: real processes, real signals."""

import random
import signal
import time

import pytest

from launch.binary import DONE, INTERRUPTED, NOT_FINITE, PEER_LOST, USER_ERROR
from tests.launch.clusters import launched
from tests.launch.programs import errors
from tests.launch.server_groups import ServerGroup
from tests.launch.server_runs import (
    EXAMPLES_A_STEP,
    LIMIT_SECONDS,
    LONG,
    PROGRAM,
    QUICK_INPUT,
    STEPS,
    all_end,
    check_counts,
    check_second_chief,
    outputs,
    resumed_to_the_end,
    signalled,
    summary,
)

pytestmark = pytest.mark.timeout(280)

# Limit from the loss of a process to the exits of the others.
END_SECONDS = 40


@pytest.fixture
def group_of(tmp_path):
    """Builds clusters of slow_input_program.py, in the test's folder; most tests need one server only."""

    def group(*flags: str, workers: int = 2, servers: int = 1, **more) -> ServerGroup:
        command = (*PROGRAM, "--engine=tensorflow", *flags)
        return ServerGroup(command, workers=workers, servers=servers, cwd=tmp_path, **more)

    return group


@pytest.mark.full
def test_an_undisturbed_run(group_of, tmp_path):
    with group_of(servers=2) as group:
        chief = all_end(group)["chief:0"]
    assert "engine: tensorflow (ParameterServerStrategy), as asked" in chief.out
    figures = check_counts(tmp_path)
    assert {server["pushes"] for server in figures["servers"].values()} == {STEPS}
    assert set(figures["workers"]) == {"worker:0", "worker:1"}
    held = [server["kept_bytes"] for server in figures["servers"].values()]
    assert max(held) <= 1.1 * sum(held) / len(held)
    assert summary(tmp_path)["engine"] == {"name": "tensorflow", "reason": "as asked"}


@pytest.mark.full
def test_a_killed_worker_that_is_restarted(group_of, tmp_path):
    with group_of(servers=2) as group:
        signalled(group, tmp_path, signal.SIGKILL, "worker:1")
        group.processes["worker:1"].wait(END_SECONDS)
        group.start("worker:1")
        all_end(group, limit_seconds=LIMIT_SECONDS)
    workers = check_counts(tmp_path)["workers"]
    assert {name: worker["failures"] for name, worker in workers.items()} == {"worker:0": 0, "worker:1": 1}


@pytest.mark.full
def test_a_stopped_worker_is_ended_and_the_others_do_its_steps(group_of, tmp_path):
    """The worker never continues. The run evaluates, saves and ends without it."""
    with group_of("--worker_timeout_seconds=2") as group:
        signalled(group, tmp_path, signal.SIGSTOP, "worker:1")
        ends = group.ends(LIMIT_SECONDS)
    stopped = ends.pop("worker:1")
    assert stopped.code == -signal.SIGKILL
    assert "worker:1 was stopped (SIGSTOP) for --worker_timeout_seconds=2: killed" in stopped.err
    assert {ended.code for ended in ends.values()} == {DONE}, outputs(ends)
    assert "worker:1 was lost at step " in ends["chief:0"].err
    assert "Traceback" not in ends["chief:0"].err
    figures = check_counts(tmp_path)
    assert figures["workers"]["worker:1"]["failures"] == 1
    assert {server["pushes"] for server in figures["servers"].values()} == {STEPS}
    assert (tmp_path / "run" / "model.keras").exists()


@pytest.mark.full
def test_the_steps_of_a_worker_that_never_returns_go_to_another_one(group_of, tmp_path):
    """The worker's input hangs, so its process lives."""
    with group_of("--worker_timeout_seconds=2", variables={"worker:1": {"SECONDS_PER_BATCH": "1000"}}) as group:
        chief = all_end(group)["chief:0"]
    assert "worker:1 gave no gradient within worker_timeout_seconds=2 at step " in chief.err
    workers = check_counts(tmp_path)["workers"]
    assert (workers["worker:0"]["steps"], workers["worker:1"]["steps"]) == (STEPS, 0)
    assert workers["worker:1"]["failures"] == 1


@pytest.mark.full
def test_a_worker_whose_steps_went_to_another_one_applies_none_again(group_of, tmp_path, unread_before):
    """The worker's input is so slow that another worker always computes its gradient first."""
    slow = {"worker:1": {"SECONDS_PER_BATCH": "2.5"}}
    with group_of("--worker_timeout_seconds=1", "--steps=40", variables=slow, servers=2) as group:
        chief = all_end(group)["chief:0"]
    assert "worker:1 gave no gradient within worker_timeout_seconds=1 at step " in chief.err
    servers = check_counts(tmp_path, steps=40)["servers"].values()
    assert {server["pushes"] for server in servers} == {40}
    assert min(server["pulls"] for server in servers) > 40, "or no gradient was refused"


@pytest.mark.full
def test_a_worker_that_is_killed_five_times(group_of, tmp_path):
    """The worker is killed at random moments; every step is counted once."""
    steps, seconds = 250, random.Random(1)
    with group_of(f"--steps={steps}", "--checkpoint_every_steps=100") as group:
        signalled(group, tmp_path, signal.SIGKILL, "worker:1", step=100)
        for _ in range(4):
            group.processes["worker:1"].wait(END_SECONDS)
            group.start("worker:1")
            time.sleep(seconds.uniform(0.2, 3.0))
            is_over = group.processes["chief:0"].poll() is not None
            # Also if the run is over: a worker started then would wait for a chief until its startup timeout.
            group.processes["worker:1"].kill()
            if is_over:
                break
        group.processes["worker:1"].wait(END_SECONDS)
        group.start("worker:1")
        chief = group.end("chief:0", 200)
    assert chief.code == DONE, chief.err
    check_counts(tmp_path, steps=steps)


@pytest.mark.full
def test_a_killed_server_ends_the_cluster(group_of, tmp_path):
    with group_of(servers=2) as group:
        signalled(group, tmp_path, signal.SIGKILL, "ps:0")
        ends = group.ends(END_SECONDS)
    assert ends.pop("ps:0").code == -signal.SIGKILL
    chief = ends.pop("chief:0")
    assert chief.code == PEER_LOST, outputs({"chief:0": chief})
    assert "ps:0 (127.0.0.1:" in errors(chief)[0]
    assert {ended.code for ended in ends.values()} == {PEER_LOST}, outputs(ends)


@pytest.mark.full
def test_a_stopped_server_ends_the_cluster(group_of, tmp_path):
    with group_of("--worker_timeout_seconds=2", workers=1, servers=2) as group:
        signalled(group, tmp_path, signal.SIGSTOP, "ps:1")
        ends = group.ends(END_SECONDS)
    assert ends.pop("ps:1").code == -signal.SIGKILL
    assert {ended.code for ended in ends.values()} == {PEER_LOST}, outputs(ends)
    assert "ps:1 (127.0.0.1:" in errors(ends["chief:0"])[0]


@pytest.mark.full
def test_a_stopped_chief_ends_the_cluster_after_the_timeout(group_of, tmp_path):
    with group_of("--collective_timeout_seconds=4") as group:
        signalled(group, tmp_path, signal.SIGSTOP, "chief:0")
        ends = {name: group.end(name, END_SECONDS) for name in group.processes if name != "chief:0"}
    assert {ended.code for ended in ends.values()} == {PEER_LOST}, outputs(ends)
    assert "chief:0 (127.0.0.1:" in errors(ends["ps:0"])[0]
    assert "was silent for 4 seconds" in errors(ends["ps:0"])[0]


@pytest.mark.full
def test_a_chief_may_evaluate_for_longer_than_the_timeout(group_of, unread_before):
    """The evaluation has four batches, of 1.5 seconds each."""
    slow = {"chief:0": {"SECONDS_PER_EVALUATION_BATCH": "1.5"}}
    with group_of("--collective_timeout_seconds=4", "--steps=10", workers=1, variables=slow) as group:
        all_end(group)


@pytest.mark.full
def test_a_killed_chief_ends_the_cluster_which_can_resume(group_of, tmp_path):
    with group_of() as group:
        signalled(group, tmp_path, signal.SIGKILL, "chief:0")
        ends = group.ends(END_SECONDS)
    assert ends.pop("chief:0").code == -signal.SIGKILL
    assert {ended.code for ended in ends.values()} == {PEER_LOST}, outputs(ends)
    for ended in ends.values():
        assert "chief:0 (127.0.0.1:" in errors(ended)[0]
    assert resumed_to_the_end(group_of(variables=QUICK_INPUT), tmp_path) >= 10


@pytest.mark.full
def test_processes_that_never_start_are_named(group_of, tmp_path):
    with group_of("--startup_timeout_seconds=6", missing=["ps:1", "worker:1"], servers=2) as group:
        ends = all_end(group, PEER_LOST, END_SECONDS)
    for ended in ends.values():
        (line,) = errors(ended)
        assert "ps:1 (127.0.0.1:" in line
        assert "worker:1 (127.0.0.1:" in line
        assert "did not start within --startup_timeout_seconds=6" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_second_chief_is_refused_by_name(group_of, tmp_path):
    with group_of(LONG) as group:
        check_second_chief(group, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["worker:1", "ps:1"])
def test_sigterm_to_one_process_stops_all(group_of, tmp_path, name):
    with group_of(servers=2) as group:
        signalled(group, tmp_path, signal.SIGTERM, name)
        chief = all_end(group, INTERRUPTED)["chief:0"]
    stopped = int(chief.out.split("stopped at step ")[1].split(";")[0])
    assert 10 <= stopped < STEPS
    assert summary(tmp_path)["steps"] == stopped
    assert resumed_to_the_end(group_of(servers=2, variables=QUICK_INPUT), tmp_path) == stopped


@pytest.mark.full
def test_nan_stops_the_run(group_of):
    with group_of(workers=1, variables={"worker:0": {"NAN_FROM": "4"}}) as group:
        chief = group.end("chief:0", LIMIT_SECONDS)
    assert chief.code == NOT_FINITE, chief.err
    (line,) = errors(chief)
    assert "is not finite and was not applied" in line


@pytest.mark.full
def test_nan_is_skipped(group_of, tmp_path):
    with group_of("--on_nan=skip", variables={"worker:1": {"NAN_FROM": "4"}}) as group:
        all_end(group)
    found = summary(tmp_path)
    assert (found["steps"], found["examples"]) == (STEPS, EXAMPLES_A_STEP * STEPS)
    assert found["skipped_steps"] > 0


@pytest.mark.full
def test_a_process_with_different_flags_is_refused(group_of):
    with group_of(more_flags={"worker:1": ["--momentum=0.5"]}) as group:
        ends = all_end(group, USER_ERROR)
    for ended in ends.values():
        (line,) = errors(ended)
        assert "worker:1 was started with optimizer.momentum=0.5, and chief:0 with optimizer.momentum=0.9" in line


@pytest.mark.full
def test_a_worker_that_reads_other_data_is_refused(group_of):
    variables = {f"{name}:{index}": {"DATA_SEED": "1"} for name in ("worker", "ps") for index in range(2)}
    variables |= {"chief:0": {"DATA_SEED": "1"}, "worker:1": {"DATA_SEED": "2"}}
    with group_of(variables=variables) as group:
        ends = all_end(group, USER_ERROR)
    for ended in ends.values():
        (line,) = errors(ended)
        assert "worker:1 was started with first_batches=" in line
        assert "all must read the same data" in line


@pytest.mark.full
def test_a_server_of_the_other_engine_is_named(group_of, monkeypatch):
    monkeypatch.setenv("SILENT_SECONDS", "3")
    with group_of(more_flags={"ps:1": ["--engine=own", "--startup_timeout_seconds=30"]}, servers=2) as group:
        ends = {name: group.end(name, END_SECONDS) for name in ("chief:0", "worker:0", "worker:1", "ps:0")}
    assert {ended.code for ended in ends.values()} == {USER_ERROR}, outputs(ends)
    for ended in ends.values():
        (line,) = errors(ended)
        assert "ps:1 (127.0.0.1:" in line
        assert "does not use --engine=tensorflow" in line


@pytest.mark.full
def test_the_launcher_replaces_a_worker_that_is_stopped_and_then_killed(tmp_path):
    command = ("python", *PROGRAM, "--worker_timeout_seconds=2")
    plan = "--stop=worker:1@step10"
    flags = ("--workers=2", "--ps=1", "--chief", "--max_restarts=1", plan, "--grace_seconds=1")
    with launched(tmp_path, "", *flags, command=command) as cluster:
        ended = cluster.ended()
    assert ended.code == DONE, ended.err
    assert "recovered: worker:1 was stopped at step 10, restart 1 completed" in ended.out
    assert summary(tmp_path)["steps"] == STEPS
