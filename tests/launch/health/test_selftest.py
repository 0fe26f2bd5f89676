"""The self-test's problems, with small programs in place of its two workers."""

import os
import sys

import pytest

from launch.health import selftest
from tests.launch.system_networks import needs_private_network

RANK = "import json, os, sys, time; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"


@pytest.fixture
def found(monkeypatch):
    """A function that runs the self-test with a program in place of both workers, and returns the section."""

    def run(program, other_seconds=60.0):
        monkeypatch.setattr(selftest, "_COMMAND", (sys.executable, "-c", RANK + program))
        monkeypatch.setattr(selftest, "_OTHER_SECONDS", other_seconds)
        return selftest.selftest(os.environ, timeout_seconds=1.0)

    return run


def problem_of(section) -> str:
    assert section.facts == {"ring of 2": "failed"}
    (problem,) = section.problems
    assert "\n" not in problem
    return problem


def test_the_section_reports_what_worker_0_prints(found):
    section = found("print(json.dumps([['float32', 8, 0.0625], ['bfloat16', 32, 0.004]]) if rank == 0 else 'no')")
    assert section.problems == ()
    assert section.facts == {"float32 8 MiB": "62.50 ms, 0.12 GiB/s", "bfloat16 32 MiB": "4.00 ms, 7.81 GiB/s"}


def test_both_workers_get_one_cluster_no_gpu_and_the_timeout(found):
    program = (
        "described = json.loads(os.environ['TF_CONFIG']); "
        "alike = [len(set(described['cluster']['worker'])), os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1]]; "
        "sys.exit(f'{alike}')"
    )
    assert problem_of(found(program)).endswith("ended with exit code 1: [2, '-1', '1.0']")


@pytest.mark.full
@needs_private_network
def test_only_the_workers_reach_their_servers(found):
    """TensorFlow's servers listen on every interface, without authentication, so the workers only have 'lo'."""
    program = "import socket; sys.exit(f'{[name for _, name in socket.if_nameindex()]}')"
    assert problem_of(found(program)).endswith("ended with exit code 1: ['lo']")


@pytest.mark.full
def test_the_worker_that_failed_first_is_named(found, monkeypatch, tmp_path):
    """Worker 1 fails, then worker 0 loses its peer. The self-test notices both exits at the same time."""
    monkeypatch.setattr(selftest, "_POLL_SECONDS", 2.0)
    program = f"""
mark = {str(tmp_path / "mark")!r}
if rank == 1:
    open(mark, "w").close()
    sys.exit("first\\nno luck")
while not os.path.exists(mark):
    time.sleep(0.01)
time.sleep(0.5)
sys.exit(5)
"""
    assert problem_of(found(program)) == "self-test: worker:1 ended with exit code 1: no luck"


@pytest.mark.timeout(60)
def test_a_failure_ends_the_other_worker(found):
    assert problem_of(found("time.sleep(100) if rank else sys.exit(3)")).endswith("exit code 3: no message")


@pytest.mark.full
def test_the_self_test_ends_although_its_workers_do_not(found):
    problem = problem_of(found("time.sleep(100)", other_seconds=0.5))
    assert problem.startswith("self-test: it did not end within 1.5 seconds")
