"""A server whose memory cannot hold its part of a run is named before anything is sent."""

from strategies.servers.server_memory import check_memory
from tests.towers.user_errors import refused

GIB = 2**30


def test_the_server_is_named():
    check_memory(3 * GIB, {"ps:0": 3 * GIB, "ps:1": 8 * GIB})
    with refused("ps:1 can get 2.5 GiB more memory", "takes 3 GiB", "start more servers"):
        check_memory(3 * GIB, {"ps:0": 3 * GIB, "ps:1": int(2.5 * GIB)})
