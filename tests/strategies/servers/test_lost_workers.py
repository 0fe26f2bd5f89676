"""Synchronous workers that are killed, or stand still, in the middle of a step: the numbers stay one device's.

Real processes, real signals. Three workers divide batches of 8 and of 5 examples, with dropout, augmentation and
batch statistics, so the parts are uneven and depend on each part's seed.
"""

import json
import signal
import time

import pytest

from launch.membership.tf_config import cluster_from
from strategies.cluster import CHIEF
from strategies.contract import Strategy
from strategies.registry import build_strategy
from strategies.servers.report_section import SECTION
from tests.conformance.row_checks import apart
from tests.launch.server_groups import ServerGroup
from tests.strategies.servers import lost_workers_program as program
from tests.strategies.small_task import random_task, values_of
from tests.towers.logical_cpus import cpus

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

NUM_WORKERS, NUM_SERVERS, STEPS = 3, 2, 20
# A killed worker is noticed by its broken connection, so this long time only keeps a worker that traces on a busy
# machine from counting as away.
OF_A_KILLED, OF_A_STOPPED = program.LIMIT_SECONDS, 3.0


@pytest.fixture
def group_of():
    """Builds clusters whose worker `worker` sends itself a signal; the others wait for it for `seconds`."""

    def group(worker: str, number: int, seconds: float) -> ServerGroup:
        variables = {worker: {"SIGNAL": str(int(number))}}
        command = ["-m", program.__name__, str(seconds)]
        counts = {"workers": NUM_WORKERS, "servers": NUM_SERVERS}
        return ServerGroup(command, **counts, missing=["chief:0"], variables=variables, with_this_process=True)

    return group


def chief_of(group: ServerGroup, seconds: float) -> Strategy:
    cluster = cluster_from(json.dumps({"cluster": group.cluster, "task": {"type": CHIEF, "index": 0}}))
    membership = program.membership_of(cluster, seconds)
    return build_strategy("ps", random_task(), cpus(1), program.step_options(), servers=membership)


def check_numbers(strategy: Strategy, steps: int) -> None:
    """Asserts that all values equal those of one process that computes the same parts."""
    alone = build_strategy("towers", random_task(), cpus(NUM_WORKERS), program.step_options())
    alone.run_steps(steps)
    found, expected = values_of(strategy), values_of(alone)
    assert found.keys() == expected.keys()
    counters = {name: int(value) for name, value in expected.items() if name.startswith("counters/")}
    assert {name: int(found[name]) for name in counters} == counters
    assert apart(found, {name: expected[name] for name in expected.keys() - counters.keys()}, 1e-9) == {}


def workers_of(report) -> dict:
    return {worker.name: worker for worker in report.sections[SECTION].workers}


@pytest.mark.parametrize("victim", ["worker:1", "worker:0"])
def test_the_others_compute_the_part_of_a_killed_worker(group_of, victim):
    with group_of(victim, signal.SIGKILL, OF_A_KILLED) as group:
        strategy = chief_of(group, OF_A_KILLED)
        workers = workers_of(strategy.run_steps(STEPS))
        check_numbers(strategy, STEPS)
        strategy.finish(completed=True)
        ends = group.ends(program.LIMIT_SECONDS)
    assert {name for name, ended in ends.items() if ended.code != 0} == {victim}
    assert (workers[victim].steps, workers[victim].failures) == (program.AT_STEP, 1)
    assert sum(worker.steps for worker in workers.values()) == NUM_WORKERS * STEPS
    assert sum(worker.taken_over for worker in workers.values()) == STEPS - program.AT_STEP
    assert f"{victim} was lost at step {program.AT_STEP}: worker:" in ends["ps:0"].err
    assert "takes over its part of the batch" in ends["ps:0"].err


def test_the_others_compute_the_part_of_a_stopped_worker_until_it_is_back(group_of):
    with group_of("worker:1", signal.SIGSTOP, OF_A_STOPPED) as group:
        strategy = chief_of(group, OF_A_STOPPED)
        steps = STEPS
        before = workers_of(strategy.run_steps(steps))["worker:1"]
        assert before.steps <= program.AT_STEP and before.failures >= 1
        group.processes["worker:1"].send_signal(signal.SIGCONT)
        deadline = time.monotonic() + program.LIMIT_SECONDS
        while workers_of(strategy.run_steps(1))["worker:1"].steps == 0:
            assert time.monotonic() < deadline, "it did not come back"
            steps += 1
            time.sleep(0.05)
        steps += 1
        check_numbers(strategy, steps)
        strategy.finish(completed=True)
        ends = group.ends(program.LIMIT_SECONDS)
    assert {ended.code for ended in ends.values()} == {0}
    assert (
        f"worker:1 gave no gradient within worker_timeout_seconds=3 at step {program.AT_STEP}" in ends["ps:0"].err
    )
    assert "worker:1 is back" in ends["ps:0"].err
