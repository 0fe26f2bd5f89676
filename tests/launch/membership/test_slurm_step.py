"""A Slurm step becomes a ring, with recorded environments and with a real Slurm."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as drawn

from launch.membership.hostlist import expand_hosts
from launch.membership.slurm_step import (
    FIRST_PORT,
    TASKS_OF_A_NODE,
    cluster_from_slurm,
    first_port,
    positions_of_ranks,
    ranks_by_role,
)
from strategies.cluster import CHIEF, SERVER, WORKER
from tests.launch.membership.test_hostlist import HOSTS, WITH_ENDS
from tests.launch.slurm_node import HOST, needs_slurm, slurm_nodes
from tests.towers.user_errors import refused

PORT = first_port(123456, 0)

# The environment of rank 3, with two tasks on each of three nodes and one on the fourth: what Slurm 22.05 sets,
# reduced to the variables about nodes and ranks.
ENVIRON = {
    "SLURMD_NODENAME": "node10",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "node[1-2,10-12]",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[1-2,10-12]",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[2,10-12]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
# The environment of a batch script with `#SBATCH -N2 --ntasks-per-node=2`: it has a rank, but is not a task.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NODELIST": "node[2,10]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# The shell that salloc opens, a step of one task.
INTERACTIVE = BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def changed(**values):
    """ENVIRON with other values; None removes a variable."""
    return {name: value for name, value in (ENVIRON | values).items() if value is not None}


def hosts_of(cluster):
    return [address.partition(":")[0] for address in cluster.addresses[WORKER]]


def test_ranks_fill_one_node_after_another():
    """The order of nodes is Slurm's: node10 follows node2."""
    cluster = cluster_from_slurm(ENVIRON)
    assert cluster.addresses == {
        "worker": (
            f"node2:{PORT}",
            f"node2:{PORT + 1}",
            f"node10:{PORT}",
            f"node10:{PORT + 1}",
            f"node11:{PORT}",
            f"node11:{PORT + 1}",
            f"node12:{PORT}",
        )
    }
    assert cluster.rank == cluster.index == 3
    assert cluster.this.address == f"node10:{PORT + 1}"


@pytest.mark.parametrize("distribution", ["block", "block:cyclic", "block,Pack", "*:cyclic", "*"])
def test_other_names_of_the_block_distribution(distribution):
    assert cluster_from_slurm(changed(SLURM_DISTRIBUTION=distribution)) == cluster_from_slurm(ENVIRON)


@pytest.mark.parametrize("distribution", ["cyclic", "cyclic:block", "CYCLIC"])
def test_ranks_distributed_round_robin(distribution):
    cluster = cluster_from_slurm(changed(SLURM_DISTRIBUTION=distribution, SLURM_NODEID="3", SLURM_LOCALID="0"))
    assert hosts_of(cluster) == ["node2", "node10", "node11", "node12", "node2", "node10", "node11"]
    assert cluster.addresses[WORKER][4] == f"node2:{PORT + 1}"


def test_a_full_node_is_skipped():
    environ = changed(
        SLURM_DISTRIBUTION="cyclic",
        SLURM_STEP_TASKS_PER_NODE="1,3,2,1",
        SLURM_NODEID="3",
        SLURM_LOCALID="0",
    )
    found = hosts_of(cluster_from_slurm(environ))
    assert found == ["node2", "node10", "node11", "node12", "node10", "node11", "node10"]


def test_ranks_distributed_by_planes():
    environ = changed(SLURM_DISTRIBUTION="plane", SLURM_DIST_PLANESIZE="2", SLURM_STEP_TASKS_PER_NODE="4,3")
    environ |= {"SLURM_STEP_NODELIST": "node[2,10]"}
    found = hosts_of(cluster_from_slurm(environ))
    assert found == ["node2", "node2", "node10", "node10", "node2", "node2", "node10"]


def test_variables_of_the_job_are_used_if_the_step_has_none():
    environ = changed(
        SLURM_STEP_NODELIST=None,
        SLURM_STEP_TASKS_PER_NODE=None,
        SLURM_STEP_NUM_TASKS=None,
        SLURM_JOB_NODELIST="node[2,10-12]",
    )
    assert cluster_from_slurm(environ) == cluster_from_slurm(ENVIRON)


def test_servers_are_the_last_tasks_of_nodes():
    cluster = cluster_from_slurm(changed(TOWERS_SERVERS="2"))
    assert cluster.addresses == {
        "chief": (f"node2:{PORT}",),
        "worker": (f"node10:{PORT}", f"node11:{PORT}", f"node11:{PORT + 1}", f"node12:{PORT}"),
        "ps": (f"node2:{PORT + 1}", f"node10:{PORT + 1}"),
    }
    assert cluster.this.name == "ps:1"


@given(drawn.lists(drawn.integers(1, 9), min_size=1, max_size=9), drawn.integers(1, 9))
def test_every_rank_has_one_role(counts, num_servers):
    positions = positions_of_ranks(counts, None)
    if len(positions) < num_servers + 2:
        return
    ranks = ranks_by_role(positions, num_servers)
    assert sorted(sum(ranks.values(), [])) == list(range(len(positions)))
    assert (ranks[CHIEF], len(ranks[SERVER])) == ([0], num_servers)
    # No two servers are on one node while another node, besides the chief's, has none.
    nodes = [positions[rank][0] for rank in ranks[SERVER]]
    assert len(set(nodes)) >= min(num_servers, len(counts) - (counts[0] == 1))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT,
        INTERACTIVE,
        BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967291"},
        changed(SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1", SLURM_PROCID="0"),
        changed(SLURM_PROCID=None),
    ],
    ids=["no Slurm", "a batch script", "salloc", "a batch script as a step", "one task", "no task"],
)
def test_no_ring(environ):
    assert cluster_from_slurm(environ) is None


CASES = {
    "no hosts": (
        {"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None, "SLURM_NODELIST": ""},
        ("SLURM_STEP_NODELIST is not set",),
    ),
    "no counts": (
        {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": None},
        ("TASKS_PER_NODE is not set",),
    ),
    "no job": ({"SLURM_JOB_ID": None}, ("SLURM_JOB_ID is not set",)),
    "hosts of nonsense": ({"SLURM_STEP_NODELIST": "node[2"}, ("SLURM_STEP_NODELIST=node[2", "node[1-3,7],login")),
    "counts of nonsense": ({"SLURM_STEP_TASKS_PER_NODE": "2x3"}, ("SLURM_STEP_TASKS_PER_NODE=2x3", "2(x3),1")),
    "a rank of nonsense": ({"SLURM_PROCID": "-1"}, ("SLURM_PROCID=-1", "whole number")),
    "fewer counts than hosts": (
        {"SLURM_STEP_TASKS_PER_NODE": "3,4"},
        ("3,4: 2 counts, but 4 nodes in SLURM_STEP_NODELIST=node[2,10-12]",),
    ),
    "more tasks than counted": (
        {"SLURM_STEP_NUM_TASKS": "8"},
        ("2(x3),1: 7 tasks in all, but SLURM_STEP_NUM_TASKS=8",),
    ),
    "a rank too many": ({"SLURM_PROCID": "7"}, ("SLURM_PROCID=7", "ranks 0 to 6")),
    "another node": ({"SLURM_NODEID": "2"}, ("SLURM_NODEID=2", "rank 3 should have 1 with")),
    "another index on its node": ({"SLURM_LOCALID": "0"}, ("SLURM_LOCALID=0", "rank 3 should have 1 with")),
    "a hostfile's order": ({"SLURM_DISTRIBUTION": "arbitrary"}, ("=arbitrary", "--distribution=block")),
    "planes without a size": ({"SLURM_DISTRIBUTION": "plane"}, ("SLURM_DIST_PLANESIZE is not set",)),
    "too few tasks for the servers": (
        {"TOWERS_SERVERS": "6"},
        ("TOWERS_SERVERS=6: the step has 7 tasks", "srun --ntasks=8"),
    ),
    "servers of nonsense": ({"TOWERS_SERVERS": "two"}, ("TOWERS_SERVERS=two", "whole number")),
    "too many on a node": (
        {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "65", "SLURM_STEP_NUM_TASKS": "65"},
        ("=65: a node has 65 tasks", "fewer tasks per node"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line(name):
    values, parts = CASES[name]
    with refused(*parts, "TF_CONFIG"):
        cluster_from_slurm(changed(**values))


def test_different_steps_have_different_ports():
    """For 199 consecutive jobs, and 19 jobs of ten steps; all below Linux's range for outgoing connections."""
    job = 4_000_000
    of_jobs = {first_port(job + later, 0) for later in range(199)}
    of_steps = {first_port(job + later, step) for later in range(19) for step in range(10)}
    assert (len(of_jobs), len(of_steps)) == (199, 190)
    for ports in (sorted(of_jobs), sorted(of_steps)):
        assert all(after - before >= TASKS_OF_A_NODE for before, after in zip(ports, ports[1:], strict=False))
    assert min(of_jobs) == FIRST_PORT
    assert max(of_jobs) + TASKS_OF_A_NODE == 32736


@given(drawn.lists(drawn.integers(1, 9), min_size=1, max_size=9), drawn.none() | drawn.integers(1, 10))
def test_every_task_has_one_rank(counts, ranks_per_turn):
    positions = positions_of_ranks(counts, ranks_per_turn)
    assert sorted(positions) == [(node, local) for node, count in enumerate(counts) for local in range(count)]
    # The indices of a node's tasks are in the order of their ranks.
    for node in range(len(counts)):
        local_indices = [local for at, local in positions if at == node]
        assert local_indices == sorted(local_indices)


ONE_TASK = """
import json, os, socket
from launch.membership.tf_config import tf_config_text
from launch.membership.this_process import cluster_of_this_process

cluster = cluster_of_this_process()
listening = socket.create_server(("", int(cluster.this.address.rpartition(":")[2])))
print(json.dumps({"rank": os.environ["SLURM_PROCID"], "cluster": json.loads(tf_config_text(cluster))}))
"""


@needs_slurm
@pytest.mark.timeout(180)
def test_two_tasks_of_a_real_step(tmp_path):
    """Both tasks find the same cluster; each knows its own rank and can listen on its address."""
    with slurm_nodes() as slurm:
        # Job 1, so that the tested job is not the first.
        assert slurm.run("srun", "true").code == 0
        ended = slurm.run("srun", "--ntasks=2", sys.executable, "-c", ONE_TASK, cwd=tmp_path)
        job = slurm.run("squeue", "--noheader", "--states=all", "--format=%i").out.split()
    assert ended.code == 0, ended.err
    assert sorted(job) == ["1", "2"]
    found = sorted(map(json.loads, ended.out.splitlines()), key=lambda task: task["rank"])
    addresses = [f"{HOST}:{first_port(2, 0)}", f"{HOST}:{first_port(2, 0) + 1}"]
    assert [task["rank"] for task in found] == ["0", "1"]
    for rank, task in enumerate(found):
        assert task["cluster"]["cluster"] == {"worker": addresses}
        assert task["cluster"]["task"] == {"type": "worker", "index": rank}


@pytest.fixture(scope="module")
def two_nodes():
    """A real Slurm of node2 and node10."""
    with slurm_nodes(("node2", "node10")) as slurm:
        yield slurm


# Writes Slurm's variables of each task to task0, task1 and so on, and those of a batch script to script0.
RECORD = """
import json, os
variables = {name: value for name, value in os.environ.items() if name.startswith("SLURM")}
with open(("task" if "SLURM_STEP_ID" in variables else "script") + variables["SLURM_PROCID"], "x") as file:
    json.dump(variables, file)
"""


def recorded(kind, folder):
    """The variables of all tasks, by rank, or of the script."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"{kind}*")]
    return sorted(found, key=lambda variables: int(variables["SLURM_PROCID"]))


def assert_ring(tasks):
    """Every task finds the same ring, with each rank at the node and index that Slurm reports."""
    rings = {cluster_from_slurm(task).addresses[WORKER] for task in tasks}
    assert len(rings) == 1, rings
    (addresses,) = rings
    assert len(addresses) == len(tasks) == len(set(addresses))
    for task in tasks:
        port = first_port(int(task["SLURM_JOB_ID"]), int(task["SLURM_STEP_ID"])) + int(task["SLURM_LOCALID"])
        assert addresses[int(task["SLURM_PROCID"])] == f"{task['SLURMD_NODENAME']}:{port}"
        # The rank does not depend on these variables, which only serve as a check.
        unchecked = {name: value for name, value in task.items() if name not in ("SLURM_NODEID", "SLURM_LOCALID")}
        assert cluster_from_slurm(unchecked).rank == int(task["SLURM_PROCID"])


LAYOUTS = {
    "one task a node": ("--ntasks=2", "0 1"),
    "three tasks a node": ("--ntasks-per-node=3", "0 0 0 1 1 1"),
    "uneven": ("--ntasks=5", "0 0 0 0 1"),
    "cyclic": ("--ntasks=5 --distribution=cyclic", "0 1 0 0 0"),
    "cyclic over nodes and blocks in them": ("--ntasks=8 --distribution=cyclic:block", "0 1 0 1 0 1 0 1"),
    "planes": ("--ntasks=7 --distribution=plane=2", "0 0 1 1 0 0 1"),
    "blocks over nodes and cyclic in them": ("--ntasks=6 --distribution=block:cyclic,NoPack", "0 0 0 0 1 1"),
}


@needs_slurm
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_a_real_slurm(name, two_nodes, tmp_path):
    options, nodes = LAYOUTS[name]
    ended = two_nodes.run("srun", "--nodes=2", *options.split(), sys.executable, "-c", RECORD, cwd=tmp_path)
    assert ended.code == 0, ended.err
    tasks = recorded("task", tmp_path)
    # Another Slurm may distribute ranks differently; only `assert_ring` must hold.
    assert " ".join(task["SLURM_NODEID"] for task in tasks) == nodes
    assert_ring(tasks)


@needs_slurm
def test_a_real_batch_script_is_not_a_task_and_its_step_is_a_ring(two_nodes, tmp_path):
    (tmp_path / "record.py").write_text(RECORD)
    (tmp_path / "job").write_text(f"#!/bin/bash\n{sys.executable} record.py\nsrun {sys.executable} record.py\n")
    options = ("--nodes=2", "--ntasks-per-node=2", "--distribution=cyclic", "--output=out")
    ended = two_nodes.run("sbatch", "--wait", *options, "job", cwd=tmp_path)
    assert ended.code == 0, ended.err
    (script,), tasks = recorded("script", tmp_path), recorded("task", tmp_path)
    assert script["SLURM_NTASKS"] == "4"
    assert cluster_from_slurm(script) is None
    assert_ring(tasks)
    assert hosts_of(cluster_from_slurm(tasks[0])) == ["node2", "node10", "node2", "node10"]


@needs_slurm
@pytest.mark.parametrize("text", [text for text in HOSTS if text not in WITH_ENDS])
def test_a_real_slurm_expands_to_the_same_hosts(text, two_nodes):
    ended = two_nodes.run("scontrol", "show", "hostnames", text)
    assert expand_hosts(text) == tuple(ended.out.split())
