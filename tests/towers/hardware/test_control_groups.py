"""Limits on memory by control groups; tests/towers/test_cores.py has those on CPU time."""

import pytest

from tests.towers.control_group_files import linux
from towers.hardware.control_groups import memory_left, memory_limit

OLD = "memory/docker/a/memory."
NEW = {"job/memory.max": "5000\n", "job/memory.current": "1000\n"}


@pytest.mark.parametrize(
    "groups, files, limit, left",
    [
        ("0::/job/step\n", NEW, 5000, 4000),
        ("0::/job/step\n", NEW | {"job/step/memory.max": "max\n"}, 5000, 4000),
        ("0::/job/step\n", NEW | {"job/step/memory.max": "900\n", "job/step/memory.current": "800\n"}, 900, 100),
        ("0::/job/step\n", NEW | {"job/memory.stat": "anon 300\ninactive_file 600\n"}, 5000, 4600),
        ("0::/job/step\n", NEW | {"job/memory.current": "6000\n"}, 5000, 0),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "1000\n"}, None, None),
        # A container that sees the machine's path, but its own files.
        ("0::/kubepods/pod1\n", {"memory.max": "5000\n", "memory.current": "1000\n"}, 5000, 4000),
        ("9:memory:/docker/a\n", {OLD + "limit_in_bytes": "5000", OLD + "usage_in_bytes": "1000"}, 5000, 4000),
        ("9:memory:/docker/a\n", {OLD + "limit_in_bytes": "9223372036854771712"}, None, None),
        ("9:cpu:/docker/a\n", {OLD + "limit_in_bytes": "5000"}, None, None),
        ("", {}, None, None),
        # What some sandboxes have.
        ("nonsense\n0::/job\n", NEW | {"job/memory.stat": "anon\n\n", "job/memory.current": "?"}, 5000, 5000),
    ],
)
def test_the_smallest_on_the_path_counts(tmp_path, groups, files, limit, left):
    root = linux(tmp_path, groups, **files)
    assert (memory_limit(root), memory_left(root)) == (limit, left)
