"""The cluster that this process belongs to, as seen from here."""

import socket

from launch.health.reach import REACHED, REFUSED, SILENT, UNKNOWN_NAME, UNREACHABLE, Reach, is_port_free, reach_all
from launch.health.section import Section
from strategies.cluster import Cluster, Member

_WAYS_OUT = {
    REFUSED: "its machine answers and nothing listens there: start it, or see its log, and compare the port",
    SILENT: "the machine is down, or a firewall or NetworkPolicy drops what is sent: let this port through",
    UNKNOWN_NAME: "the name leads nowhere: compare its spelling, and see DNS (on Kubernetes the headless Service)",
    UNREACHABLE: "there is no way from here: compare the address, and see the network of both machines",
}


def no_cluster() -> Section:
    """Of a process that trains alone."""
    return Section(facts={"TF_CONFIG": "not set: this process trains alone"})


def invalid_cluster(error: str) -> Section:
    """Of a TF_CONFIG that can't be read; `error` says why and what to do, in one line."""
    return Section(facts={"TF_CONFIG": "can't be read"}, problems=(error,))


def cluster_section(cluster: Cluster, *, timeout_seconds: float) -> Section:
    """Who takes part, who of them answers, and whether this process's own port is free."""
    this = cluster.this
    others = [member for member in cluster.members() if member.name != this.name]
    ends = reach_all([member.address for member in others], timeout_seconds=timeout_seconds)
    own_port, problems = _own_port(this)
    problems += [_problem(member, end) for member, end in zip(others, ends, strict=True) if end.state != REACHED]
    facts = {
        "this process": f"{this.name} on {socket.gethostname()}",
        "members": ", ".join(f"{role} {len(found)}" for role, found in cluster.addresses.items()),
        "own port": own_port,
        **{member.name: _shown(member, end) for member, end in zip(others, ends, strict=True)},
    }
    return Section(facts=facts, problems=tuple(problems))


def _own_port(this: Member) -> tuple[str, list[str]]:
    """What to say of the port that this process is to listen on, and what is wrong with it."""
    if not this.address:
        return "none: nobody talks to it", []
    port = this.port
    try:
        if is_port_free(port):
            return f"{port}, free", []
    except OSError as error:
        return f"{port}, {error.strerror}", [
            f"{this.name} can't listen on port {port}, {error.strerror}: choose one above 1023"
        ]
    return f"{port}, taken", [
        f"{this.name} can't listen on port {port}, another process does ('ss -ltnp' tells which): "
        "if that is not the training itself, stop it or choose another port"
    ]


def _shown(member: Member, end: Reach) -> str:
    if end.state == REACHED:
        return f"{member.address}, reached in {end.seconds * 1000:.1f} ms"
    return f"{member.address}, {end.state}" + (f" ({end.reason})" if end.reason else "")


def _problem(member: Member, end: Reach) -> str:
    after = f" in {end.seconds:.1f} seconds" if end.state == SILENT else ""
    return f"{member.name} at {_shown(member, end)}{after}; {_WAYS_OUT[end.state]}"
