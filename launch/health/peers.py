"""Checks whether this process can reach the other members of its cluster."""

import socket

from launch.health.reach import REACHED, REFUSED, SILENT, UNKNOWN_NAME, UNREACHABLE, Reach, is_port_free, reach_all
from launch.health.section import Section
from strategies.cluster import Cluster, Member

_FIXES = {
    REFUSED: "its machine answers, but nothing listens on this port: start the member, or check its log and port",
    SILENT: "the machine is down, or a firewall or NetworkPolicy drops the packets: allow this port",
    UNKNOWN_NAME: "the host name has no address: check its spelling and DNS (on Kubernetes the headless Service)",
    UNREACHABLE: "there is no route to it: check the address and the network of both machines",
}


def no_cluster() -> Section:
    """The section of a process without a cluster."""
    return Section(facts={"TF_CONFIG": "not set: this process trains alone"})


def invalid_cluster(error: str) -> Section:
    """The section for variables that describe no cluster; `error` names them and says what to do, in one line."""
    return Section(facts={"cluster": "invalid"}, problems=(error,))


def cluster_section(cluster: Cluster, *, timeout_seconds: float) -> Section:
    """The cluster's members, which of them answer, and whether this process's own port is free."""
    this = cluster.this
    others = [member for member in cluster.members() if member.name != this.name]
    found = reach_all([member.address for member in others], timeout_seconds=timeout_seconds)
    reaches = list(zip(others, found, strict=True))
    own_port, problems = _own_port(this)
    problems += [_problem(member, reach) for member, reach in reaches if reach.state != REACHED]
    facts = {
        "this process": f"{this.name} on {socket.gethostname()}",
        "members": ", ".join(f"{role} {len(addresses)}" for role, addresses in cluster.addresses.items()),
        "own port": own_port,
        **{member.name: _shown(member, reach) for member, reach in reaches},
    }
    return Section(facts=facts, problems=tuple(problems))


def _own_port(this: Member) -> tuple[str, list[str]]:
    """(fact, problems) about the port that this process listens on."""
    if not this.address:
        return "none: this process listens on no port", []
    port = this.port
    try:
        if is_port_free(port, this.family):
            return f"{port}, free", []
    except OSError as error:
        return f"{port}, {error.strerror}", [
            f"{this.name} can't listen on port {port} ({error.strerror}); choose a port above 1023"
        ]
    return f"{port}, taken", [
        f"{this.name} can't listen on port {port}: another process does ('ss -ltnp' shows which); "
        "if that is not the training itself, stop it or choose another port"
    ]


def _shown(member: Member, reach: Reach) -> str:
    if reach.state == REACHED:
        return f"{member.address}, reached in {reach.seconds * 1000:.1f} ms"
    return f"{member.address}, {reach.state}" + (f" ({reach.reason})" if reach.reason else "")


def _problem(member: Member, reach: Reach) -> str:
    after = f" in {reach.seconds:.1f} seconds" if reach.state == SILENT else ""
    return f"{member.name} at {_shown(member, reach)}{after}; {_FIXES[reach.state]}"
