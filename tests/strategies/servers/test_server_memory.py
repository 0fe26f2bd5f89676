"""A server whose memory cannot hold its part of a run is named before anything is sent."""

import psutil

from strategies.servers.server_memory import check_memory, free_bytes
from tests.towers.user_errors import refused

GIB = 2**30


def test_the_server_is_named():
    check_memory(3 * GIB, {"ps:0": 3 * GIB, "ps:1": 8 * GIB})
    with refused("ps:1 can get 2.5 GiB more memory", "takes 3 GiB", "start more servers"):
        check_memory(3 * GIB, {"ps:0": 3 * GIB, "ps:1": int(2.5 * GIB)})


def test_a_containers_limit_counts(tmp_path):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    for limit, expected in (("5000", 4000), ("max", None)):
        (group / "memory.max").write_text(f"{limit}\n")
        found = free_bytes(tmp_path)
        # Without a limit the machine's figure, which changes from moment to moment.
        assert found == expected or (expected is None and found > psutil.virtual_memory().total // 100)
