"""The processes of a row: their commands, their environments and, if the row has a link, their hosts."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping, Sequence

from launch import binary
from launch.measuring.case import MEGABITS, Case
from launch.measuring.peer_on_hosts import VARIABLE as PEER_VARIABLE
from launch.membership.free_ports import free_addresses
from launch.membership.shared_gpus import environment_of_shared
from launch.membership.tf_config import tf_config_text
from launch.networks.held_network import private_network
from launch.networks.network_namespaces import Network, hosts
from launch.supervision.own_program import own_variables
from strategies.cluster import CHIEF, SERVER, WORKER, Cluster

# Any port: all are free on a new host.
_PORT = 2222
_PEER_ON_HOSTS = str(pathlib.Path(__file__).with_name("peer_on_hosts.py"))


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of a case.

    Attributes:
      name: as 'worker:1'.
      command: its command.
      environment: its whole environment.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@contextlib.contextmanager
def members_of(case: Case) -> Iterator[list[Member]]:
    """Context manager: the processes to start; the one that measures is the first. Removes their hosts at the end.

    Raises:
      NetworkError: hosts can't be made.
    """
    shared = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    shared.pop("TF_CONFIG", None)
    # The processes of this machine divide its GPUs.
    shared |= {**environment_of_shared(), **case.variables}
    with _hosts_of(case) as network, _private(network) as inside:
        if not case.processes:
            command, variables = (case.command, {}) if network is None else peer_on_hosts(case.command, network)
            yield [Member(case.work.strategy, (*inside, *command), {**shared, **variables})]
            return
        shared["TOWERS_SECRET"] = secrets.token_hex(16)
        yield [
            Member(
                cluster.this.name,
                (*(network.inside(host) if network else inside), *case.command),
                {**shared, "TF_CONFIG": tf_config_text(cluster)},
            )
            for host, cluster in enumerate(clusters(case.processes, network))
        ]


@contextlib.contextmanager
def _private(network: Network | None) -> Iterator[tuple[str, ...]]:
    """Words to put before a command to run it in a private network, if the row has no hosts and the system
    permits it: servers of TensorFlow listen on every interface and have no authentication."""
    if network is not None:
        yield ()
        return
    with private_network() as private:
        if private.problem:
            _warn_once(private.problem)
        yield private.inside


@functools.cache
def _warn_once(problem: str) -> None:
    binary.warn(
        f"no private network ({problem}): others may be able to connect to the ports of the measured processes, "
        "which need no password"
    )


def _hosts_of(case: Case) -> contextlib.AbstractContextManager[Network | None]:
    """Hosts with the row's link; None if the row has no link."""
    return contextlib.nullcontext() if case.work.link not in MEGABITS else _linked(case)


@contextlib.contextmanager
def _linked(case: Case) -> Iterator[Network]:
    with hosts(sum(case.processes.values()) or case.num_processes) as network:
        for host in range(network.num_hosts):
            network.limit(host, MEGABITS[case.work.link])
        yield network


def clusters(processes: Mapping[str, int], network: Network | None) -> list[Cluster]:
    """The cluster as each process sees it: chief, workers, servers, on consecutive hosts in this order."""
    roles = [(role, index) for role in (CHIEF, WORKER, SERVER) for index in range(processes.get(role, 0))]
    if network is None:
        listen = free_addresses(len(roles))
    else:
        listen = [f"{network.address(host)}:{_PORT}" for host in range(len(roles))]
    addresses = {
        role: tuple(address for (of_role, _), address in zip(roles, listen, strict=True) if of_role == role)
        for role in processes
    }
    return [Cluster(addresses=addresses, role=role, index=index) for role, index in roles]


def peer_on_hosts(command: Sequence[str], network: Network) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and the variables that run a peer's program with each of its processes on a host of its own."""
    python, program, *arguments = command
    places = [[network.namespace(host), network.address(host)] for host in range(network.num_hosts)]
    variables = {**own_variables(), PEER_VARIABLE: json.dumps({"program": program, "hosts": places})}
    return (python, _PEER_ON_HOSTS, *arguments), variables
