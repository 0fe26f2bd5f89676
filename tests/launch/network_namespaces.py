"""Hosts of one's own for as long as a test lasts: network namespaces of this machine, wired to one switch.

    with hosts(2) as network:
        subprocess.run([*network.inside(0), "ping", "-c1", network.address(1)])

    host 0      host 1      host 2      each a namespace
     wire        wire        wire       10.77.0.1, 10.77.0.2, 10.77.0.3
      |           |           |
    port0       port1       port2
      +--------- bridge -----+          a namespace too: of all this, the machine's own network has nothing

Debian has the programs in iproute2.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import psutil
import pytest

PROGRAMS = ("ip", "tc")
# They lie where a user's PATH may not lead.
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_COMMAND_SECONDS = 20
_STOP_SECONDS = 20
_NAMESPACES = pathlib.Path("/run/netns")
# With the process id of the test run, so that two runs don't meet.
_NAME = "towers-test-{process}-{which}"
# A megabit is a million bits, in tc too; the burst is what passes at once.
SLOW_MEGABITS = 20
_SLOW = ("tbf", "rate", f"{SLOW_MEGABITS}mbit", "burst", "32kbit", "latency", "400ms")


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts that a switch connects.

    Attributes:
      num_hosts: how many.
    """

    num_hosts: int

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> tuple[str, ...]:
        """The words before a command that is to run on a host; the process is the command's own."""
        return (_program("ip"), "netns", "exec", _name(f"host{host}"))

    def pull(self, host: int) -> None:
        """Pulls its wire out of the switch: it hears nothing and is not told why."""
        _ip("-n", _name("switch"), "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Puts its wire back."""
        _ip("-n", _name("switch"), "link", "set", f"port{host}", "up")

    def slow(self, host: int) -> None:
        """It sends no faster than SLOW_MEGABITS a second from now on."""
        _run("tc", "-n", _name(f"host{host}"), "qdisc", "add", "dev", "wire", "root", *_SLOW)

    def bytes_sent(self, host: int) -> int:
        """Over its wire, ever since it has one."""
        shown = _ip("-n", _name(f"host{host}"), "-json", "-statistics", "link", "show", "dev", "wire")
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[Network]:
    """Within, so many hosts reach each other; they and all that runs there are gone at the end."""
    _remove_orphans()
    network = Network(num_hosts)
    with contextlib.ExitStack() as made:
        made.enter_context(_namespace("switch"))
        _ip("-n", _name("switch"), "link", "add", "bridge", "type", "bridge")
        _ip("-n", _name("switch"), "link", "set", "bridge", "up")
        for host in range(num_hosts):
            made.enter_context(_namespace(f"host{host}"))
            _wire(network, host)
        yield network


def _wire(network: Network, host: int) -> None:
    """From the host to the switch."""
    here, switch = _name(f"host{host}"), _name("switch")
    other_end = ("type", "veth", "peer", "name", f"port{host}", "netns", switch)
    _ip("-n", here, "link", "add", "wire", *other_end)
    _ip("-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
    _ip("-n", here, "address", "add", f"{network.address(host)}/24", "dev", "wire")
    # A host speaks to itself by way of its loopback, whatever the address.
    for device in ("lo", "wire"):
        _ip("-n", here, "link", "set", device, "up")


@contextlib.contextmanager
def _namespace(which: str) -> Iterator[None]:
    name = _name(which)
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _remove(name)


def _remove(name: str) -> None:
    """Removes a namespace with its devices, after what runs in it, which would keep it alive without a name."""
    left = []
    for process in _ip("netns", "pids", name).split():
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(int(process)))
            left[-1].kill()
    psutil.wait_procs(left, timeout=_STOP_SECONDS)
    _ip("netns", "delete", name)


def _remove_orphans() -> None:
    """Those of test runs that were killed and could not remove them."""
    pattern = re.compile(_NAME.format(process="([0-9]+)", which=".*"))
    for name in _there():
        found = pattern.fullmatch(name)
        if found and not psutil.pid_exists(int(found[1])):
            # Another run may be at the same.
            with contextlib.suppress(RuntimeError):
                _remove(name)


def namespaces() -> list[str]:
    """The names of this test run's that are there now."""
    return [name for name in _there() if name.startswith(_name(""))]


def _there() -> list[str]:
    """The names of all that this machine has."""
    return sorted(os.listdir(_NAMESPACES)) if _NAMESPACES.is_dir() else []


def _name(which: str) -> str:
    return _NAME.format(process=os.getpid(), which=which)


def _program(name: str) -> str:
    return shutil.which(name, path=_PATH) or name


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(name: str, *words: str) -> str:
    """What a command prints; RuntimeError with its complaint if it fails."""
    done = subprocess.run(
        [_program(name), *words], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _missing() -> str:
    """Why no hosts can be made here; '' if they can, which is tried."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install iproute2"
    try:
        with hosts(1) as network:
            network.slow(0)
            _run(*network.inside(0), "true")
    except RuntimeError as error:
        return f"no network namespaces here: {error}"
    return ""


_reason = _missing()
needs_network_namespaces = pytest.mark.skipif(bool(_reason), reason=_reason)
