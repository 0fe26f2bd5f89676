"""Runs a peer's program such that each of its processes is on a host of its own, without a change to the program.

    TOWERS_PEER='{"program": "ps_step.py", "hosts": [["/run/netns/host0", "10.77.0.1"], ...]}' \\
        python peer_on_hosts.py --model=tiny

The peers start their processes themselves, with sys.argv, so these run this file too. Each process sets TF_CONFIG
to a cluster on 127.0.0.1, with the ports p, p + 1 and so on. This file then moves the process to the host
of its port, and replaces the addresses: 127.0.0.1:(p + i) by (address of host i):(p + i).
"""

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from launch.networks.network_namespaces import enter

VARIABLE = "TOWERS_PEER"


def on_hosts(tf_config: str, hosts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """A cluster's TF_CONFIG with a host for each of its ports, and the namespace of the process's own host.

    Args:
      tf_config: the text that the program sets.
      hosts: (namespace, address) of each host.
    """
    described = json.loads(tf_config)
    cluster, task = described["cluster"], described["task"]
    ports = sorted(_port(address) for addresses in cluster.values() for address in addresses)
    own = ports.index(_port(cluster[task["type"]][task["index"]]))
    described["cluster"] = {
        role: [f"{hosts[ports.index(_port(address))][1]}:{_port(address)}" for address in addresses]
        for role, addresses in cluster.items()
    }
    return json.dumps(described), hosts[own][0]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def move_when_configured(hosts: Sequence[tuple[str, str]]) -> None:
    """From now on, setting TF_CONFIG moves this process to its host."""

    class Environment(type(os.environ)):
        def __setitem__(self, name: str, value: str) -> None:
            if name == "TF_CONFIG":
                value, namespace = on_hosts(value, hosts)
                enter(namespace)
            super().__setitem__(name, value)

    os.environ.__class__ = Environment


def main(peer: Mapping) -> None:
    program = pathlib.Path(peer["program"])
    move_when_configured(peer["hosts"])
    # As if Python ran the program, except that sys.argv names this file.
    sys.path[0] = str(program.parent)
    names = {"__name__": "__main__", "__file__": str(program)}
    exec(compile(program.read_text(encoding="utf-8"), str(program), "exec"), names)


if __name__ == "__main__":
    main(json.loads(os.environ[VARIABLE]))
