"""Cores and NUMA nodes of machines that are described by files."""

import os

import pytest

from tests.towers.control_group_files import linux
from tests.towers.machine_files import machine
from towers.devices import default_towers, threads_for
from towers.hardware.cores import input_threads, may_use_all_cores, num_cores
from towers.hardware.cpu_topology import nodes_of_processes, numa_nodes, physical_cores


@pytest.fixture
def large(tmp_path):
    """64 cores on two nodes, 128 hyperthreads: CPUs 0 and 64 are one core of node 0."""
    return machine(tmp_path, nodes=2, cores_per_node=32, threads_per_core=2)


NODE_0 = {*range(32), *range(64, 96)}


@pytest.mark.parametrize(
    "cpus, cores, sizes",
    [
        (range(128), 64, [64, 64]),
        (NODE_0, 32, [64]),
        ([0, 64], 1, [2]),
        ([64, 65], 2, [2]),
        ([0, 1, 32], 3, [2, 1]),
    ],
    ids=["all", "node_0", "one_core", "second_threads", "unequal"],
)
def test_hyperthreads_and_nodes(large, cpus, cores, sizes):
    assert physical_cores(cpus, large) == cores
    assert [len(node) for node in numa_nodes(cpus, large)] == sizes


def test_nodes_are_in_the_order_of_their_numbers(tmp_path):
    nodes = numa_nodes(range(12), machine(tmp_path, nodes=12, cores_per_node=1))
    assert nodes == [{cpu} for cpu in range(12)]


@pytest.mark.parametrize("text", [None, "", "nonsense"])
def test_without_a_description_each_cpu_is_a_core(tmp_path, text):
    if text is not None:
        root = machine(tmp_path, nodes=1, cores_per_node=1)
        (root / "sys/devices/system/node/node0/cpulist").write_text(text)
        (root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list").write_text(text)
    assert physical_cores(range(4), tmp_path) == 4
    assert numa_nodes(range(4), tmp_path) == [{0, 1, 2, 3}]


@pytest.mark.parametrize(
    "cpus, limit, cores, is_whole",
    [
        (range(128), "max 100000", 64, True),
        (range(128), "350000 100000", 4, False),
        (range(128), "6400000 100000", 64, True),
        (NODE_0, "max 100000", 32, False),
        (range(64), "max 100000", 64, False),
    ],
)
def test_what_a_process_may_use(large, monkeypatch, cpus, limit, cores, is_whole):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    root = linux(large, "0::/job\n", **{"job/cpu.max": limit + "\n"})
    assert (num_cores(root), may_use_all_cores(root)) == (cores, is_whole)


@pytest.mark.parametrize("batch_size, towers, threads", [(256, 8, 8), (2048, 64, 1), (16, 1, 64), (8192, 64, 1)])
def test_towers_of_64_cores(large, batch_size, towers, threads):
    cores = physical_cores(range(128), large)
    assert default_towers(cores, batch_size) == towers and threads_for(towers, cores) == threads
    assert input_threads(cores) == 4


@pytest.mark.parametrize(
    "cores, gpus, threads", [(16, 1, 2), (48, 8, 16), (112, 8, 16), (6, 1, 2), (12, 8, 6), (2, 1, 2), (64, 1, 4)]
)
def test_threads_that_prepare_batches_for_gpus(cores, gpus, threads):
    assert input_threads(cores, gpus) == threads


@pytest.mark.parametrize(
    "count, nodes",
    [(1, None), (2, [{0, 1}, {2, 3}]), (3, None), (4, [{0}, {1}, {2}, {3}]), (8, [{i // 2} for i in range(8)])],
)
def test_processes_are_divided_over_nodes_evenly(tmp_path, count, nodes):
    known = numa_nodes(range(64), machine(tmp_path, nodes=4, cores_per_node=16))
    found = nodes_of_processes(count, known)
    assert found == (None if nodes is None else [frozenset().union(*(known[i] for i in own)) for own in nodes])


@pytest.mark.parametrize("cpus, is_bound", [([*range(31), *range(32, 64)], True), ([*range(4), 32, 33], False)])
def test_nodes_of_unequal_sizes(large, cpus, is_bound):
    assert (nodes_of_processes(2, numa_nodes(cpus, large)) is not None) == is_bound


def test_processes_on_one_node_are_not_bound(tmp_path):
    assert nodes_of_processes(2, numa_nodes(range(8), machine(tmp_path, nodes=1, cores_per_node=8))) is None
