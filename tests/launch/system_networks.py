"""What networks this system permits, and marks for tests that need them.

Other programs than ours are asked, so that a mistake of ours does not look like a refusal of the system.
"""

import functools
import os
import shutil
import subprocess

import pytest

_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_LIMIT_SECONDS = 20
# A host, its wire, a switch and a limit, in a namespace of their own.
_HOST = """
set -e
ip netns add "$0"
trap 'ip netns delete "$0"' EXIT
ip -n "$0" link add switch type bridge
ip -n "$0" link add wire type veth peer name port
tc -n "$0" qdisc add dev wire root tbf rate 1mbit burst 128kb latency 50ms
"""


def _ends_well(*command: str) -> bool:
    try:
        done = subprocess.run(command, env={"PATH": _PATH}, capture_output=True, timeout=_LIMIT_SECONDS)
    except OSError:
        return False
    return done.returncode == 0


@functools.cache
def permits_private_network() -> bool:
    """Whether a process may enter a network that has only a loopback interface."""
    in_it = ("ip", "link", "set", "lo", "up") if shutil.which("ip", path=_PATH) else ("true",)
    kinds = (("--net",), ("--user", "--map-root-user", "--net"))
    return any(_ends_well("unshare", *kind, *in_it) for kind in kinds)


@functools.cache
def permits_hosts() -> bool:
    """Whether hosts can be made, which are network namespaces with wires between them."""
    return _ends_well("sh", "-c", _HOST, f"towers-probe-{os.getpid()}")


needs_private_network = pytest.mark.skipif(
    not permits_private_network(), reason="this system permits no private network"
)
needs_hosts = pytest.mark.skipif(not permits_hosts(), reason="this system permits no hosts of its own (ip, tc)")
