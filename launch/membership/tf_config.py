"""TF_CONFIG: a cluster written down as JSON in the environment of each of its processes.

{"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}

Names that are not of these, as 'environment' or 'rpc_layer', are for other readers and passed over.
"""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence

from strategies.cluster import CHIEF, EVALUATOR, RING_ROLES, SERVER, Cluster
from towers.errors import UserError

_ROLES = (*RING_ROLES, SERVER)
_EXAMPLE = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
_ADDRESS = re.compile(r"(\[(?P<ipv6>[^\[\]\s]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")
_SHOWN_CHARACTERS = 80


def cluster_from(text: str) -> Cluster | None:
    """The cluster that TF_CONFIG describes; None for '' and '{}', by which one says that there is none.

    Raises:
      UserError: it describes no cluster, or not this process's place in it.
    """
    described = _object(text) if text.strip() else {}
    if not described:
        return None
    addresses = _addresses(described.get("cluster"))
    role, index = _task(described.get("task"), addresses)
    return Cluster(addresses=addresses, role=role, index=index)


def tf_config_text(cluster: Cluster) -> str:
    """What TF_CONFIG must be for `cluster_from` to give this cluster."""
    addresses = {role: list(of_role) for role, of_role in cluster.addresses.items()}
    return json.dumps({"cluster": addresses, "task": {"type": cluster.role, "index": cluster.index}})


def public_addresses(cluster: Cluster) -> tuple[str, ...]:
    """Addresses that the whole internet may reach, where they say so: those of a literal, globally routable IP.

    TensorFlow's servers run whatever anyone who reaches them sends: there is no password. What a host's name
    stands for is not looked up.
    """
    return tuple(member.address for member in cluster.members() if _is_public(member.address))


def _object(text: str) -> Mapping[str, object]:
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{_shown(text)} is not JSON ({error}); write it as {_EXAMPLE}") from error
    if not isinstance(described, dict):
        raise _refused(f"{_shown(described)} is no JSON object; write it as {_EXAMPLE}")
    return described


def _addresses(described: object) -> dict[str, tuple[str, ...]]:
    """The cluster's addresses by role; a role that nobody has is left out."""
    if not isinstance(described, dict) or not any(described.values()):
        raise _refused(f"its cluster is {_shown(described)}: addresses by role are needed; write it as {_EXAMPLE}")
    addresses = {role: _of_role(role, listed) for role, listed in described.items() if listed != []}
    _check_unique(addresses)
    num_chiefs = len(addresses.get(CHIEF, ()))
    if num_chiefs > 1:
        raise _refused(f"{num_chiefs} chiefs: a cluster has one at most; make the others workers")
    if SERVER in addresses and not num_chiefs:
        raise _refused(
            f"{len(addresses[SERVER])} of role 'ps' and no chief: parameter servers need one to tell them what "
            'to do; add "chief": ["host:port"]'
        )
    return addresses


def _of_role(role: str, listed: object) -> tuple[str, ...]:
    """The addresses of one role, each checked."""
    _check_role(role)
    if not isinstance(listed, list):
        raise _refused(
            f'{role!r} has {_shown(listed)}: a role has a list of addresses; write "{role}": ["host:port"]'
        )
    for index, address in enumerate(listed):
        if not isinstance(address, str) or _split(address) is None:
            raise _refused(
                f"the address of {role}:{index} is {_shown(address)}: an address is host:port with a port from 1 "
                "to 65535, an IPv6 host in brackets; write it as 'host:2222'"
            )
    return tuple(listed)


def _check_role(role: str) -> None:
    """Raises UserError if a cluster has no such role."""
    if role == "master":
        raise _refused("the cluster holds 'master': TensorFlow 2 has no such role; call it 'chief'")
    if role == EVALUATOR:
        raise _refused(
            "the cluster holds 'evaluator': nobody talks to one, so that it takes no part in the cluster; leave "
            'it out there, its own task stays {"type": "evaluator", "index": 0}'
        )
    if role not in _ROLES:
        raise _refused(f"the cluster holds {_shown(role)}: roles are {', '.join(_ROLES)}; take one of these")


def _check_unique(addresses: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError if two processes share an address."""
    seen = {}
    for role, of_role in addresses.items():
        for index, address in enumerate(of_role):
            name, place = f"{role}:{index}", _split(address)
            if place in seen:
                raise _refused(
                    f"{address!r} is the address of {seen[place]} and of {name}: each process listens on its own; "
                    "give one of them another port"
                )
            seen[place] = name


def _task(described: object, addresses: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    """This process's role and index."""
    if not isinstance(described, dict) or not {"type", "index"} <= described.keys():
        raise _refused(
            f"its task is {_shown(described)}: type and index say which process this one is; add "
            '"task": {"type": "worker", "index": 0}'
        )
    role, index = described["type"], _index(described["index"])
    if role == EVALUATOR:
        return role, index
    if not isinstance(role, str) or role not in addresses:
        known = ", ".join(addresses)
        hint = "call it 'chief', there and in the cluster" if role == "master" else f"take one of {known}"
        raise _refused(f"the task's type is {_shown(role)}: the cluster has {known}; {hint}")
    if index >= len(addresses[role]):
        count = len(addresses[role])
        raise _refused(
            f"the task's index is {index}: the cluster has {count} of role {role!r}, numbered from 0; give 0 to "
            f"{count - 1}, or add its address"
        )
    return role, index


def _index(described: object) -> int:
    """A task's index, also from a text of digits: some launchers write "0"."""
    if isinstance(described, str) and re.fullmatch(r"-?[0-9]{1,9}", described):
        described = int(described)
    # To Python, true is an integer.
    if not isinstance(described, int) or isinstance(described, bool):
        raise _refused(f"the task's index is {_shown(described)}: an index is an integer; give 0 for the first")
    if described < 0:
        raise _refused(f"the task's index is {described}: indices begin at 0; give 0 for the first")
    return described


def _split(address: str) -> tuple[str, int] | None:
    """Host, in small letters and without brackets, and port; None if it is no address."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    host = match["ipv6"] or match["host"]
    if match["ipv6"] and _ip(host) is None:
        return None
    return host.lower(), int(match["port"])


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(address: str) -> bool:
    place = _split(address)
    ip = _ip(place[0]) if place else None
    return ip is not None and ip.is_global


def _shown(value: object) -> str:
    """A value in an error: on one line, and not all of a long one."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _refused(why: str) -> UserError:
    return UserError(f"TF_CONFIG: {why}")
