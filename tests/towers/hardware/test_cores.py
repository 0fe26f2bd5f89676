"""Cores that a process may use: affinity, and limits of control groups, in folders that look like Linux's."""

import os

import pytest

from tests.towers.control_group_files import linux
from towers.hardware.control_groups import core_quota
from towers.hardware.cores import may_use_all_cores, num_cores


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


VERSION_2 = "0::/job/step\n"
VERSION_1 = "12:memory:/docker/a\n5:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n"


CPU = "cpu/docker/a/cpu.cfs_"
BOTH, SWAPPED = "cpu,cpuacct/docker/a/cpu.cfs_", "cpuacct,cpu/docker/a/cpu.cfs_"


@pytest.mark.parametrize(
    "groups, files, cores",
    [
        (VERSION_2, {}, 8),
        (VERSION_2, {"job/step/cpu.max": "max 100000\n"}, 8),
        (VERSION_2, {"job/step/cpu.max": "400000 100000\n"}, 4),
        (VERSION_2, {"job/step/cpu.max": "250000 100000\n"}, 3),
        (VERSION_2, {"job/step/cpu.max": "50000 100000\n"}, 1),
        (VERSION_2, {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "200000 100000\n"}, 2),
        (VERSION_2, {"job/step/cpu.max": "200000 100000\n", "job/cpu.max": "600000 100000\n"}, 2),
        (VERSION_2, {"job/step/cpu.max": "1600000 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        # A container that sees the machine's path, but its own files.
        ("0::/kubepods/pod1\n", {"cpu.max": "300000 100000\n"}, 3),
        (VERSION_1, {BOTH + "quota_us": "-1", BOTH + "period_us": "100000"}, 8),
        (VERSION_1, {BOTH + "quota_us": "500000", BOTH + "period_us": "100000"}, 5),
        (VERSION_1, {CPU + "quota_us": "150000", CPU + "period_us": "100000"}, 2),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        (VERSION_1, {SWAPPED + "quota_us": "250000", SWAPPED + "period_us": "100000"}, 3),
        (VERSION_1, {"memory/docker/a/cpu.cfs_quota_us": "1", "memory/docker/a/cpu.cfs_period_us": "1"}, 8),
        ("", {}, 8),
        (VERSION_2, {"job/step/cpu.max": "nonsense\n"}, 8),
        (VERSION_2, {"job/step/cpu.max": "100000 0\n"}, 8),
    ],
)
def test_limits_count_as_cores(eight_cores, tmp_path, groups, files, cores):
    assert num_cores(linux(tmp_path, groups, **files)) == cores


def test_a_system_without_control_groups(eight_cores, tmp_path):
    assert core_quota(tmp_path) is None and num_cores(tmp_path) == 8


def test_affinity_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert num_cores(linux(tmp_path, VERSION_2, **{"job/step/cpu.max": "400000 100000\n"})) == 1


def test_some_cores_are_not_all(eight_cores, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert may_use_all_cores(tmp_path)
    assert not may_use_all_cores(linux(tmp_path, VERSION_2, **{"job/step/cpu.max": "400000 100000\n"}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert not may_use_all_cores(tmp_path)
