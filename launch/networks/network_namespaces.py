"""Hosts for some processes of this machine: network namespaces, wired to one switch.

    with hosts(2) as network:
        subprocess.run([*network.inside(0), "ping", "-c1", network.address(1)])

    host 0      host 1      host 2      each a namespace
     wire        wire        wire       10.77.0.1, 10.77.0.2, 10.77.0.3
      |           |           |
    port0       port1       port2
      +--------- bridge -----+          a namespace too, so the machine's own network is not changed

The programs `ip` and `tc` are in Debian's package iproute2.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import psutil

PROGRAMS = ("ip", "tc")
# The programs may be in folders that are not on a user's PATH.
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_COMMAND_SECONDS = 20
_STOP_SECONDS = 20
_NAMESPACES = pathlib.Path("/run/netns")
# Contains the id of the process that made the namespace, so that two processes use different names.
_NAME = "towers-{process}-{purpose}"
# `burst` is the amount that passes at full speed: at least one packet of 64 KiB, as a host gives it to its wire.
# `latency` bounds the queue in front of the wire, which drops packets beyond the bound.
_BURST, _LATENCY = "128kb", "50ms"
# From <linux/sched.h>.
_NETWORK_NAMESPACE = 0x40000000


class NetworkError(RuntimeError):
    """A host can't be made: a program is missing or the system does not permit it."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts that a switch connects.

    Attributes:
      num_hosts: the number of hosts.
    """

    num_hosts: int

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> tuple[str, ...]:
        """Words to put before a command to run it on a host, in the same process."""
        return (_program("ip"), "netns", "exec", _name(f"host{host}"))

    def namespace(self, host: int) -> str:
        """The file of a host's network namespace."""
        return str(_NAMESPACES / _name(f"host{host}"))

    def pull(self, host: int) -> None:
        """Pulls a host's wire out of the switch: the host receives nothing, not even an error."""
        _ip("-n", _name("switch"), "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Plugs a host's wire in again."""
        _ip("-n", _name("switch"), "link", "set", f"port{host}", "up")

    def limit(self, host: int, megabits: int) -> None:
        """From now on limits a host's wire to `megabits` million bits per second in each direction."""
        shape = ("tbf", "rate", f"{megabits}mbit", "burst", _BURST, "latency", _LATENCY)
        for namespace, device in ((f"host{host}", "wire"), ("switch", f"port{host}")):
            _run("tc", "-n", _name(namespace), "qdisc", "add", "dev", device, "root", *shape)

    def bytes_sent(self, host: int) -> int:
        """Bytes that a host has sent over its wire so far."""
        shown = _ip("-n", _name(f"host{host}"), "-json", "-statistics", "link", "show", "dev", "wire")
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[Network]:
    """Context manager: hosts that reach each other; removes them at the end, with everything that runs there.

    Raises:
      NetworkError: a host can't be made.
    """
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
    """Connects a host to the switch."""
    here, switch = _name(f"host{host}"), _name("switch")
    other_end = ("type", "veth", "peer", "name", f"port{host}", "netns", switch)
    _ip("-n", here, "link", "add", "wire", *other_end)
    _ip("-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
    _ip("-n", here, "address", "add", f"{network.address(host)}/24", "dev", "wire")
    # A host reaches itself through its loopback interface, at any of its addresses.
    for device in ("lo", "wire"):
        _ip("-n", here, "link", "set", device, "up")


@contextlib.contextmanager
def _namespace(purpose: str) -> Iterator[None]:
    name = _name(purpose)
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _remove(name)


def _remove(name: str) -> None:
    """Removes a namespace with its devices; first kills its processes, which would keep it without a name."""
    left = []
    for process in _ip("netns", "pids", name).split():
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(int(process)))
            left[-1].kill()
    psutil.wait_procs(left, timeout=_STOP_SECONDS)
    _ip("netns", "delete", name)


def _remove_orphans() -> None:
    """Removes the namespaces whose makers were killed."""
    pattern = re.compile(_NAME.format(process="([0-9]+)", purpose=".*"))
    for name in _existing():
        found = pattern.fullmatch(name)
        if found and not psutil.pid_exists(int(found[1])):
            # Another process may be removing it too.
            with contextlib.suppress(NetworkError):
                _remove(name)


def namespaces() -> list[str]:
    """The names of this process's namespaces that exist now."""
    return [name for name in _existing() if name.startswith(_name(""))]


def _existing() -> list[str]:
    """The names of all network namespaces of this machine."""
    return sorted(os.listdir(_NAMESPACES)) if _NAMESPACES.is_dir() else []


def _name(purpose: str) -> str:
    return _NAME.format(process=os.getpid(), purpose=purpose)


def _program(name: str) -> str:
    return shutil.which(name, path=_PATH) or name


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(name: str, *words: str) -> str:
    """Runs a command and returns its output; raises NetworkError with its stderr if it fails."""
    try:
        done = subprocess.run(
            [_program(name), *words],
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            # Ctrl-C must not end it halfway: it signals all processes of the terminal's session.
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{name} {' '.join(words)}: {error}") from error
    if done.returncode:
        raise NetworkError(f"{name} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_no_hosts() -> str:
    """The reason why this process can't make hosts; '' if it can; tries it once."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (apt-get install iproute2)"
    try:
        with hosts(1) as network:
            network.limit(0, megabits=100)
            _run(*network.inside(0), "true")
    except NetworkError as error:
        return str(error)
    return ""


def enter(namespace: str) -> None:
    """Moves this process into a network namespace, as `ip netns exec` does. (os.setns needs Python 3.12.)

    Args:
      namespace: the file of the namespace.

    Raises:
      OSError: the system does not permit it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), f"could not enter {namespace}")
    finally:
        os.close(descriptor)
