"""Clusters of our own parameter servers whose processes fail: real processes, real signals."""

import json
import re
import signal

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.binary import DONE, INTERRUPTED, NOT_FINITE, PEER_LOST, USER_ERROR
from tests.launch.nursery import nursery
from tests.launch.programs import checkpoint_values, environment, errors
from tests.launch.server_groups import ServerGroup
from tests.launch.server_runs import (
    END_SECONDS,
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
    wait_for_step,
)

pytestmark = pytest.mark.timeout(120)

SYNC = "--staleness=sync"


@pytest.fixture
def own(tmp_path):
    """Builds clusters of slow_input_program.py, in the test's folder; most tests need one server only."""

    def group(*flags: str, workers: int = 2, servers: int = 1, **more) -> ServerGroup:
        command = (*PROGRAM, "--engine=own", *flags)
        return ServerGroup(command, workers=workers, servers=servers, cwd=tmp_path, **more)

    return group


@pytest.mark.full
def test_an_undisturbed_run(own, tmp_path):
    with own(servers=2) as group:
        all_end(group)
    figures = check_counts(tmp_path)
    assert {server["pushes"] for server in figures["servers"].values()} == {STEPS}
    assert set(figures["workers"]) == {"worker:0", "worker:1"}
    assert all(worker["failures"] == 0 for worker in figures["workers"].values())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    stale = [line["staleness"] for line in lines if line["kind"] == "train"]
    assert sum(sum(report["histogram"].values()) for report in stale) == STEPS
    assert all(0 <= report["mean"] <= report["max"] for report in stale)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"staleness/mean", "staleness/max", "staleness"} <= set(events.Tags()["tensors"])


@pytest.mark.parametrize(
    "victims, flags",
    [
        pytest.param(("worker:1",), (), id="one-async", marks=pytest.mark.full),
        pytest.param(("worker:0", "worker:1"), (SYNC,), id="all-sync", marks=pytest.mark.full),
    ],
)
def test_killed_workers_that_are_restarted(own, tmp_path, flags, victims):
    with own(*flags) as group:
        signalled(group, tmp_path, signal.SIGKILL, *victims)
        for victim in victims:
            group.processes[victim].wait(END_SECONDS)
            group.start(victim)
        all_end(group)
    workers = check_counts(tmp_path, is_sync=bool(flags))["workers"]
    assert {name for name, worker in workers.items() if worker["failures"] == 1} == set(victims)


@pytest.mark.full
def test_a_chief_that_no_worker_is_left_to_saves_at_sigterm(own, tmp_path):
    """For example all workers may have ended with a user's error, such as a label out of range."""
    workers = ("worker:0", "worker:1")
    with own(SYNC) as group:
        signalled(group, tmp_path, signal.SIGKILL, *workers)
        for name in workers:
            group.processes[name].wait(END_SECONDS)
        group.processes["chief:0"].send_signal(signal.SIGTERM)
        ends = group.ends(END_SECONDS)
    others = {name: ended.code for name, ended in ends.items() if name not in workers}
    assert set(others.values()) == {INTERRUPTED}, outputs(ends)
    assert resumed_to_the_end(own(SYNC, variables=QUICK_INPUT), tmp_path, is_sync=True) >= 1


@pytest.mark.full
def test_a_killed_server_ends_the_cluster_which_can_resume(own, tmp_path):
    victim, flags = "ps:1", (SYNC,)
    with own(*flags, servers=2) as group:
        signalled(group, tmp_path, signal.SIGKILL, victim)
        ends = group.ends(END_SECONDS)
    assert ends.pop(victim).code == -signal.SIGKILL
    assert {ended.code for ended in ends.values()} == {PEER_LOST}, outputs(ends)
    for name in ("chief:0", "worker:0", "worker:1"):
        (line,) = errors(ends[name])
        assert f"{victim} (127.0.0.1:" in line, outputs(ends)
        assert re.search("(was|were) lost", line)
    assert resumed_to_the_end(own(*flags, servers=2, variables=QUICK_INPUT), tmp_path, is_sync=True) >= 10


@pytest.mark.full
def test_a_resumed_synchronous_run_is_bit_equal(own, tmp_path, monkeypatch):
    """So are its moving statistics, which server 0 holds."""
    monkeypatch.setenv("BATCH_NORM", "1")
    flags = (SYNC, "--checkpoint_every_steps=7", "--momentum=0.9")
    with own(*flags, servers=2) as group:
        signalled(group, tmp_path, signal.SIGKILL, "ps:0", step=7)
        group.ends(END_SECONDS)
    resumed_to_the_end(own(*flags, servers=2, variables=QUICK_INPUT), tmp_path, is_sync=True)
    with own(*flags, "--directory=undisturbed", servers=2, variables=QUICK_INPUT) as group:
        all_end(group)
    found, wanted = (checkpoint_values(tmp_path / directory, STEPS) for directory in ("run", "undisturbed"))
    apart = [key for key in wanted if found[key].tobytes() != wanted[key].tobytes()]
    assert [key for key in wanted if "moving_mean" in key]
    assert found.keys() == wanted.keys()
    assert not apart


@pytest.mark.full
def test_a_killed_chief_ends_the_cluster_which_can_resume(own, tmp_path):
    with own(servers=2) as group:
        signalled(group, tmp_path, signal.SIGKILL, "chief:0")
        ends = group.ends(END_SECONDS)
    assert ends.pop("chief:0").code == -signal.SIGKILL
    assert {ended.code for ended in ends.values()} == {PEER_LOST}, outputs(ends)
    for name in ("ps:0", "ps:1"):
        assert "the chief was lost" in errors(ends[name])[0]
    assert resumed_to_the_end(own(servers=2, variables=QUICK_INPUT), tmp_path) >= 10


@pytest.mark.full
def test_a_server_that_never_starts_is_named(own, tmp_path):
    with own("--startup_timeout_seconds=6", missing=["ps:1"], servers=2) as group:
        ends = all_end(group, PEER_LOST, END_SECONDS)
    for name in ("chief:0", "worker:0", "worker:1"):
        (line,) = errors(ends[name])
        assert "ps:1 (127.0.0.1:" in line
        assert "could not be reached within 6 seconds" in line
        assert "startup_timeout_seconds" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_worker_that_never_starts_is_named(own):
    with own(SYNC, "--startup_timeout_seconds=6", missing=["worker:1"]) as group:
        chief = all_end(group, PEER_LOST, END_SECONDS)["chief:0"]
    (line,) = errors(chief)
    assert "worker:1 did not connect within 6 seconds" in line


@pytest.mark.full
def test_async_workers_train_without_a_missing_one_and_report_it(own, tmp_path):
    with own("--worker_timeout_seconds=1", missing=["worker:1"]) as group:
        ends = all_end(group)
    ((name, worker),) = check_counts(tmp_path)["workers"].items()
    assert name == "worker:0"
    assert worker["taken_over"] > 0
    assert "worker:1 is away at step " in ends["ps:0"].err
    assert "worker:1 is absent" in ends["chief:0"].out
    assert "worker:0 is absent" not in ends["chief:0"].out


@pytest.mark.full
def test_a_second_chief_is_refused_by_name(own, tmp_path):
    with own(LONG) as group:
        check_second_chief(group, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["worker:1", "ps:1"])
def test_sigterm_to_one_process_stops_all_at_the_same_step(own, tmp_path, name):
    with own(servers=2) as group:
        signalled(group, tmp_path, signal.SIGTERM, name)
        chief = all_end(group, INTERRUPTED)["chief:0"]
    assert "stopped at step" in chief.out
    stopped = int(chief.out.split("stopped at step ")[1].split(";")[0])
    assert 10 <= stopped < STEPS
    assert summary(tmp_path)["steps"] == stopped
    assert resumed_to_the_end(own(servers=2, variables=QUICK_INPUT), tmp_path) == stopped


@pytest.mark.full
def test_async_another_worker_takes_over_the_step_of_a_stopped_one(own, tmp_path):
    before_it_computes = {"worker:1": {"TOWERS_FAULT": "stop@20"}}
    with own("--collective_timeout_seconds=3", variables=before_it_computes, servers=2) as group:
        stopped = group.processes.pop("worker:1")
        wait_for_step(group, tmp_path, STEPS - 10)
        stopped.send_signal(signal.SIGCONT)
        all_end(group)
        assert stopped.wait(END_SECONDS) == PEER_LOST
        assert "ps:0" in group.written("worker:1", "err")
    figures = check_counts(tmp_path)
    assert figures["workers"]["worker:1"]["failures"] == 1
    # The stopped worker's gradients were not pushed after it continued.
    assert {server["pushes"] for server in figures["servers"].values()} == {STEPS}


@pytest.mark.full
def test_sync_a_killed_worker_that_is_not_restarted(own, tmp_path):
    with own(SYNC, servers=2) as group:
        signalled(group, tmp_path, signal.SIGKILL, "worker:1")
        assert group.processes.pop("worker:1").wait(END_SECONDS) == -signal.SIGKILL
        ends = all_end(group)
    workers = check_counts(tmp_path, is_sync=True)["workers"]
    assert (workers["worker:1"]["failures"], workers["worker:0"]["failures"]) == (1, 0)
    assert workers["worker:0"]["taken_over"] == STEPS - workers["worker:1"]["steps"] > 0
    (line,) = (line for line in ends["ps:0"].err.splitlines() if "takes over" in line)
    assert re.search(r"worker:1 was lost at step \d+: worker:0 takes over its part of the batch", line)
    assert f"{workers['worker:0']['taken_over']} for others" in ends["chief:0"].out
    check_one_device(tmp_path)


@pytest.mark.full
def test_sync_a_stopped_worker_that_continues(own, tmp_path):
    # Longer than a step on busy cores, because a slower step would count as a failure too.
    with own(SYNC, "--worker_timeout_seconds=3") as group:
        signalled(group, tmp_path, signal.SIGSTOP, "worker:1")
        wait_for_step(group, tmp_path, 30)
        group.processes["worker:1"].send_signal(signal.SIGCONT)
        ends = all_end(group)
    workers = check_counts(tmp_path, is_sync=True)["workers"]
    assert workers["worker:1"]["failures"] == 1
    assert 10 <= workers["worker:0"]["taken_over"] < 50 and workers["worker:1"]["steps"] > 10
    assert "worker:1 gave no gradient within worker_timeout_seconds=3" in ends["ps:0"].err
    assert "worker:1 is back" in ends["ps:0"].err
    check_one_device(tmp_path)


def check_one_device(cwd) -> None:
    """Asserts that the run's last values are those of one device."""
    flags = ("--strategy=towers", "--num_towers=1", "--directory=alone")
    files = [str(cwd / f"alone.{stream}") for stream in ("out", "err")]
    env = environment() | {"SECONDS_PER_BATCH": "0"}
    alone = nursery().start((*PROGRAM, *flags), cwd=cwd, env=env, files=files)
    assert alone.wait(LIMIT_SECONDS) == DONE
    found, wanted = (checkpoint_values(cwd / directory, STEPS) for directory in ("run", "alone"))
    assert found.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_sync_the_loss_of_the_last_worker_ends_the_run(own, tmp_path, number):
    with own(SYNC, "--collective_timeout_seconds=3", "--worker_timeout_seconds=1", workers=1) as group:
        signalled(group, tmp_path, number, "worker:0")
        chief = group.end("chief:0", END_SECONDS)
    assert chief.code == PEER_LOST, chief.err
    (line,) = errors(chief)
    assert "worker:0 did not answer within 3 seconds" in line
    assert " seconds: waiting for worker:0, at most 3 seconds in total" in chief.err


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", [pytest.param((), id="async", marks=pytest.mark.full), pytest.param((SYNC,), id="sync")]
)
def test_nan_stops_the_run(own, flags):
    with own(*flags, variables={"worker:1": {"NAN_FROM": "4"}}) as group:
        chief = group.end("chief:0", LIMIT_SECONDS)
    assert chief.code == NOT_FINITE, chief.err
    (line,) = errors(chief)
    assert "is not finite and was not applied" in line


@pytest.mark.full
def test_nan_is_skipped(own, tmp_path):
    with own("--on_nan=skip", SYNC, variables={"worker:1": {"NAN_FROM": "4"}}) as group:
        all_end(group)
    found = summary(tmp_path)
    assert found["steps"] == STEPS
    assert found["skipped_steps"] == STEPS - 4


@pytest.mark.full
@pytest.mark.parametrize(
    "flag, what", [("--learning_rate=0.2", "--learning_rate=0.2"), ("--momentum=0.5", "optimizer.momentum=0.5")]
)
def test_a_worker_with_different_flags_ends_all_with_one_line(own, flag, what):
    with own("--schedule=constant", more_flags={"worker:1": [flag]}) as group:
        ends = all_end(group, USER_ERROR)
    for ended in ends.values():
        (line,) = errors(ended)
        assert f"worker:1 was started with {what}, and chief:0 with" in line


@pytest.mark.full
def test_a_server_with_different_flags_is_refused(own):
    with own(more_flags={"ps:0": ["--momentum=0.5"]}) as group:
        ends = {name: group.end(name, END_SECONDS) for name in ("chief:0", "ps:0")}
    for ended in ends.values():
        assert ended.code == USER_ERROR, outputs(ends)
        (line,) = errors(ended)
        assert "chief:0 was started with optimizer.momentum=0.9, and ps:0 with optimizer.momentum=0.5" in line


@pytest.mark.full
def test_no_update_is_staler_than_the_bound(own, tmp_path, unread_before):
    slow = {"worker:0": {"SECONDS_PER_BATCH": "0.2"}}
    with own("--staleness=1", "--steps=30", workers=3, variables=slow) as group:
        all_end(group)
    found = summary(tmp_path)
    assert found["steps"] == 30
    staleness = found["parameter_servers"]["staleness"]
    assert staleness["max"] <= 1
    assert sum(staleness["histogram"].values()) == 30


@pytest.mark.full
def test_without_a_bound_the_updates_of_a_slow_worker_are_stale(own, tmp_path, unread_before):
    """This shows that the bounds in the test above have an effect."""
    with own("--staleness=async", workers=3, variables={"worker:0": {"SECONDS_PER_BATCH": "0.4"}}) as group:
        all_end(group)
    assert summary(tmp_path)["parameter_servers"]["staleness"]["max"] > 3


@pytest.mark.full
def test_a_backup_worker_is_not_waited_for(own, tmp_path, unread_before):
    slow = {"worker:2": {"SECONDS_PER_BATCH": "0.2"}}
    num_steps = 90
    with own(SYNC, "--backup_workers=1", f"--steps={num_steps}", workers=3, variables=slow) as group:
        all_end(group)
    found = summary(tmp_path)
    assert found["steps"] == num_steps
    workers = found["parameter_servers"]["workers"]
    assert sum(worker["steps"] for worker in workers.values()) == 2 * num_steps, "two gradients a step"
    assert found["parameter_servers"]["turned_away"] > 0
    assert workers.get("worker:2", {"steps": 0})["steps"] < num_steps / 2
