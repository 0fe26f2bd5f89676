"""Addresses on this machine on which a process listens, or none does."""

import contextlib
import socket

import pytest

from launch.membership.free_ports import free_addresses

FAMILIES = {"127.0.0.1": socket.AF_INET, "[::1]": socket.AF_INET6}


@contextlib.contextmanager
def server(host="127.0.0.1"):
    """Context manager: listens on a free port of the host; yields the address."""
    try:
        found = socket.create_server((host.strip("[]"), 0), family=FAMILIES[host])
    except OSError as error:
        pytest.skip(f"cannot listen on {host} on this machine: {error}")
    with found:
        yield f"{host}:{found.getsockname()[1]}"


def free(host="127.0.0.1") -> str:
    """An address on which no process listens."""
    port = free_addresses(1)[0].rpartition(":")[2]
    return f"{host}:{port}"
