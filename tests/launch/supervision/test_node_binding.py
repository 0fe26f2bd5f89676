"""Processes bound to the CPUs of a NUMA node."""

import os
import subprocess
import sys

import pytest

from launch.membership.roles import Roles
from launch.supervision import cluster_run
from launch.supervision.node_binding import children_on, cpus_of_processes
from tests.towers.control_group_files import linux
from tests.towers.machine_files import machine

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")


@pytest.fixture
def two_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return machine(tmp_path, nodes=2, cores_per_node=4, threads_per_core=2)


def test_workers_are_bound_and_servers_are_not(two_nodes):
    roles = Roles(workers=4, ps=2, chief=True)
    found = cpus_of_processes(roles.computing, two_nodes)
    left, right = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    assert found == {"worker:0": left, "worker:1": left, "worker:2": right, "worker:3": right}


@pytest.mark.parametrize("count, limit", [(3, "max 100000"), (2, "400000 100000")], ids=["uneven", "quota"])
def test_processes_that_are_not_bound(two_nodes, count, limit):
    root = linux(two_nodes, "0::/job\n", **{"job/cpu.max": limit + "\n"})
    assert cpus_of_processes(Roles(workers=count).computing, root) == {}


def test_a_child_runs_on_its_cpus_alone():
    before = os.sched_getaffinity(0)
    program = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with children_on({max(before)}):
        bound = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert bound.stdout.strip() == str([max(before)]) and os.sched_getaffinity(0) == before


# Writes a file, and waits for the others' files: the launcher ends servers and workers once their chief has ended.
_SAYS = """
import json, os, pathlib, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
found = f"{sorted(os.sched_getaffinity(0))} {os.environ['TOWERS_PROCESSES_HERE']}"
path = pathlib.Path(f"{task['type']}:{task['index']}")
path.with_suffix(".new").write_text(found)
path.with_suffix(".new").rename(path)
while len(list(pathlib.Path().glob("*:?"))) < 5:
    time.sleep(0.02)
"""


@pytest.mark.skipif("len(os.sched_getaffinity(0)) < 2", reason="two CPUs, for two nodes")
def test_a_cluster_s_processes_run_on_their_nodes_and_know_who_shares_them(monkeypatch, tmp_path):
    """Three workers of parameter servers, on what seem two nodes; servers and their chief may use all CPUs."""
    usable = sorted(os.sched_getaffinity(0))
    nodes = (usable[0], usable[0], usable[1])
    on_nodes = [{node} for node in nodes]
    monkeypatch.setattr(cluster_run, "cpus_of_processes", lambda names: dict(zip(names, on_nodes, strict=True)))
    monkeypatch.chdir(tmp_path)
    plan = cluster_run.Plan(
        command=(sys.executable, "-c", _SAYS),
        variables={},
        roles=Roles(workers=3, ps=1, chief=True),
        directory=tmp_path / "run",
        faults={},
        max_restarts=0,
        seconds_to_notice=20,
        seconds_to_save=20,
    )
    assert cluster_run.LocalRun(plan).run() == 0
    said = {path.name: path.read_text() for path in tmp_path.glob("*:?")}
    bound = {f"worker:{index}": f"[{node}] {nodes.count(node)}" for index, node in enumerate(nodes)}
    assert said == bound | dict.fromkeys(("chief:0", "ps:0"), f"{usable} 3")
