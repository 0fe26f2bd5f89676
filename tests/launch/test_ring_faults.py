"""A ring whose workers fail: real processes, real signals."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from launch.binary import INTERRUPTED, NOT_FINITE, PEER_LOST, USER_ERROR
from launch.membership.free_ports import free_addresses
from tests.launch.nursery import nursery
from tests.launch.programs import LAST_STEP, ROOT, Ended, assert_same_end, errors, wait_for
from tests.launch.workers import LONG, TRAIN, Workers
from tests.tiers import first_quick

pytestmark = pytest.mark.timeout(280)

LIMIT_SECONDS = 120
# TensorFlow notices missing heartbeats after a few seconds.
HEARTBEAT_SECONDS = 60
OWN = (
    str(ROOT / "tests" / "launch" / "ring_program.py"),
    "--strategy=ring",
    "--num_towers=1",
    "--steps=12",
    "--batch_stats=average",
    "--learning_rate=0.1",
    "--report_every_steps=1",
    "--directory=run",
)


def ring(command, *, cwd, num_workers=2, **more) -> Workers:
    return Workers([command] * num_workers, cwd=cwd, **more)


def own(mischief: str, *flags: str, cwd: pathlib.Path, worker: int = 1) -> Workers:
    """The ring of ring_program.py, in which one worker misbehaves."""
    return ring((*OWN, *flags), cwd=cwd, environments={worker: {"MISCHIEF": mischief}})


@pytest.mark.full
def test_only_the_chief_writes_files_and_shows_progress(undisturbed):
    chief, other = undisturbed.ends
    assert f"step {LAST_STEP}/{LAST_STEP}" in chief.out
    assert "checkpoint: " in chief.out
    assert other.out == ""
    summary = json.loads((undisturbed.directory / "summary.json").read_text())
    assert set(summary["workers"]) == {"worker:0", "worker:1"}
    assert all(time["busy_seconds"] > 0 for time in summary["workers"].values())


def interrupted_in_the_middle(workers: Workers, cwd: pathlib.Path, number: int, rank: int) -> None:
    """Sends a signal to one rank after step 10 is saved."""
    wait_for(cwd / "run" / "checkpoints" / "step-10.index", workers.processes[0])
    workers.processes[rank].send_signal(number)


def resumed_to_the_end(cwd: pathlib.Path) -> str:
    """Runs the same command again; returns the chief's output."""
    with ring(TRAIN, cwd=cwd) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    assert [ended.code for ended in ends] == [0, 0], ends[0].err + ends[1].err
    return ends[0].out


def assert_reports_lost(survivor: Ended, victim: int) -> None:
    assert survivor.code == PEER_LOST
    assert f"worker:{victim} (127.0.0.1:" in survivor.err
    assert "was lost at step" in survivor.err


@pytest.mark.full
def test_a_killed_worker_ends_the_ring_which_can_resume(tmp_path, undisturbed):
    """The chief is killed in `test_a_chief_that_is_killed_while_it_saves`."""
    with ring(TRAIN, cwd=tmp_path) as workers:
        interrupted_in_the_middle(workers, tmp_path, signal.SIGKILL, 1)
        assert_reports_lost(workers.end(0, HEARTBEAT_SECONDS), 1)
    assert "resumed at step" in resumed_to_the_end(tmp_path)
    assert_same_end(tmp_path / "run", undisturbed.directory)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["tensorflow", "own"])
def test_data_that_each_worker_shuffles_in_its_own_order_are_refused(tmp_path, engine):
    """Otherwise the workers would compute their parts of different batches."""
    environments = dict.fromkeys((0, 1), {"MISCHIEF": "shuffle"})
    with ring((*OWN, f"--engine={engine}"), cwd=tmp_path, environments=environments) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    assert [ended.code for ended in ends] == [USER_ERROR] * 2, ends[0].err + ends[1].err
    for ended in ends:
        (line,) = errors(ended)
        assert "worker:1 and worker:0 read different batches of 'train'" in line
        assert "use shuffle(..., seed=1)" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.full
def test_data_that_all_workers_shuffle_alike_are_trained_on(tmp_path):
    environments = dict.fromkeys((0, 1), {"MISCHIEF": "shuffle", "SEED": "1"})
    with ring(OWN, cwd=tmp_path, environments=environments) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    assert [ended.code for ended in ends] == [0, 0], ends[0].err + ends[1].err


@pytest.mark.full
def test_a_stopped_chief_ends_the_ring(tmp_path):
    with ring(LONG, cwd=tmp_path) as workers:
        interrupted_in_the_middle(workers, tmp_path, signal.SIGSTOP, 0)
        survivor = workers.end(1, HEARTBEAT_SECONDS)
    assert survivor.code == PEER_LOST, survivor.err
    assert "worker:0" in survivor.err


@pytest.mark.full
def test_a_worker_that_never_starts_is_named(tmp_path):
    missing = 0
    command = (*TRAIN, "--startup_timeout_seconds=6")
    with ring(command, cwd=tmp_path, num_workers=3, missing=[missing]) as workers:
        ends = workers.ends(HEARTBEAT_SECONDS)
        address = workers.addresses[missing]
    for ended in ends:
        assert ended.code == PEER_LOST
        (line,) = errors(ended)
        assert f"worker:{missing} ({address}) did not start" in line
        assert "startup_timeout_seconds=6" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_worker_that_exits_early_ends_the_ring(tmp_path):
    with own("leave", cwd=tmp_path) as workers:
        assert workers.end(1, LIMIT_SECONDS).code == 0
        left = workers.end(0, HEARTBEAT_SECONDS)
    assert left.code == PEER_LOST
    assert "worker:1" in left.err


def assert_sigterm_stops_both(command, *, cwd: pathlib.Path, receiver: int) -> None:
    """Sends SIGTERM twice to one worker."""
    with ring(command, cwd=cwd) as workers:
        interrupted_in_the_middle(workers, cwd, signal.SIGTERM, receiver)
        time.sleep(0.05)
        workers.processes[receiver].send_signal(signal.SIGTERM)
        chief, other = workers.ends(LIMIT_SECONDS)
    assert (chief.code, other.code) == (INTERRUPTED, INTERRUPTED), chief.err + other.err
    assert "stopped at step" in chief.out


@pytest.mark.full
def test_sigterm_to_the_other_worker_stops_both_at_the_same_step(tmp_path, undisturbed):
    assert_sigterm_stops_both(TRAIN, cwd=tmp_path, receiver=1)
    assert "resumed at step" in resumed_to_the_end(tmp_path)
    assert_same_end(tmp_path / "run", undisturbed.directory)


@pytest.mark.full
def test_sigterm_during_an_evaluation_stops_both_before_its_end(tmp_path, unread_before):
    """The worker that gets no signal evaluates more slowly."""
    slow = {0: {"SECONDS_PER_EVALUATION_BATCH": "2"}}
    with ring((*LONG, "--steps=10", "--evaluate_every_epochs=100"), cwd=tmp_path, environments=slow) as workers:
        wait_for(tmp_path / "run" / "model.keras", workers.processes[0])
        workers.processes[1].send_signal(signal.SIGTERM)
        chief, other = workers.ends(LIMIT_SECONDS)
    assert (chief.code, other.code) == (INTERRUPTED, INTERRUPTED), chief.err + other.err
    assert "a signal to another process: stopped at step 10; to resume" in chief.out
    assert "evaluation" not in chief.out


@pytest.mark.full
def test_sigterm_to_the_chief_stops_both_at_the_same_step(tmp_path):
    """The receiver makes no difference to what is saved, so the test above covers resuming."""
    assert_sigterm_stops_both(LONG, cwd=tmp_path, receiver=0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['steps']}.index").exists()


def test_a_port_that_is_in_use(tmp_path):
    addresses = free_addresses(2)
    host, port = addresses[1].split(":")
    listens = (
        f"import socket, sys; s = socket.create_server(('{host}', {port})); print(flush=True); sys.stdin.read()"
    )
    command = (*nursery().inside, sys.executable, "-c", listens)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        command = (*TRAIN, "--startup_timeout_seconds=10")
        with ring(command, cwd=tmp_path, addresses=addresses) as workers:
            # The other worker can't notice this, and ends a minute later, or when its launcher ends it.
            taken = workers.end(1, HEARTBEAT_SECONDS)
    assert taken.code == USER_ERROR
    assert f"worker:1: cannot listen on port {port}" in taken.err
    assert "end the program that uses it" in taken.err


@pytest.mark.full
def test_nan_on_one_worker_stops_all_at_the_same_step(tmp_path):
    with own("nan", cwd=tmp_path) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    for ended in ends:
        assert ended.code == NOT_FINITE, ended.err
        assert "step 4 is not finite" in ended.err
        assert "clean the data" in ended.err


@pytest.mark.full
def test_nan_on_one_worker_is_skipped_by_all(tmp_path):
    with own("nan", "--on_nan=skip", cwd=tmp_path) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    for ended in ends:
        assert ended.code == 0, ended.err
        assert "skipped 8" in ended.out


@pytest.mark.full
def test_a_chief_that_is_killed_while_it_saves(tmp_path, undisturbed):
    with ring(TRAIN, cwd=tmp_path) as workers:
        checkpoints = tmp_path / "run" / "checkpoints"
        wait_for(checkpoints / "step-10.index", workers.processes[0])
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(checkpoints.glob("step-15*")):
            assert time.monotonic() < deadline
        workers.processes[0].kill()
        assert_reports_lost(workers.end(1, HEARTBEAT_SECONDS), 0)
    assert "resumed at step" in resumed_to_the_end(tmp_path)
    assert_same_end(tmp_path / "run", undisturbed.directory)


@pytest.mark.full
def test_a_straggler_is_reported(tmp_path, unread_before):
    with own("slow", cwd=tmp_path) as workers:
        chief, other = workers.ends(LIMIT_SECONDS)
    assert (chief.code, other.code) == (0, 0), chief.err
    assert "straggler {'name': 'worker:1'" in chief.out


@pytest.mark.full
def test_a_worker_that_hangs_ends_the_ring_and_all_print_their_stacks(tmp_path):
    with own("hang", "--collective_timeout_seconds=5", cwd=tmp_path) as workers:
        waiting, stuck = workers.ends(LIMIT_SECONDS)
    assert waiting.code == PEER_LOST
    assert "collective_timeout_seconds=5" in waiting.err
    assert stuck.code not in (0, PEER_LOST), "the exit code distinguishes the cause from the waiting workers"
    for ended in (waiting, stuck):
        assert "most recent call first" in ended.err
        assert "ring_program.py" in ended.err


@pytest.mark.full
def test_a_worker_whose_parameters_drift(tmp_path):
    with own("drift", "--check_divergence_every=2", cwd=tmp_path) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    for ended in ends:
        assert ended.code == 1, ended.err
        assert "worker:0 and worker:1 differ: 1 of 4 variables are not the same at step" in ended.err
        assert "logits/bias" in ended.err


@pytest.mark.parametrize(
    "flag, what",
    first_quick(
        [
            ("--learning_rate=0.3", "learning_rate=0.3"),
            ("--batch_size=16", "batch_size=16"),
            ("--steps=29", "trains to step 29"),
            ("--evaluate_every_steps=7", "evaluates at step 7"),
            ("--zero=1", "--zero=1, and worker:0 with --zero=0"),
            ("--engine=own", "--engine=own, and worker:0 with --engine=auto"),
        ]
    ),
)
def test_workers_with_different_flags(tmp_path, flag, what):
    alike = (*TRAIN, "--schedule=constant")
    with Workers([alike, (*alike, flag)], cwd=tmp_path) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    for ended in ends:
        assert ended.code == USER_ERROR, ended.err
        assert re.search(r"worker:1 (was started with|trains to step|evaluates at step)", ended.err), ended.err
        assert what in ended.err
        assert re.search("start all (processes|workers) with the same (settings|evaluate_every_steps)", ended.err)
