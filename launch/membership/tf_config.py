"""TF_CONFIG: the cluster as JSON, in the environment of each of its processes.

{"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}

Other names, such as 'environment' or 'rpc_layer', are for other programs and are ignored.
"""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence

from strategies.cluster import CHIEF, EVALUATOR, RING_ROLES, SERVER, WORKER, Cluster
from towers.errors import UserError

_ROLES = (*RING_ROLES, SERVER)
_EXAMPLE = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
_ADDRESS = re.compile(r"(\[(?P<ipv6>[^\[\]\s]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")
# Python's sockets raise an error of their own for a name with an empty or longer part.
_NAME = re.compile(r"[^.]{1,63}(\.[^.]{1,63})*\.?")
_SHOWN_CHARACTERS = 80


def cluster_from(text: str) -> Cluster | None:
    """The cluster that the value of TF_CONFIG describes; None for '', '{}' and an empty cluster.

    Raises:
      UserError: the text describes no valid cluster, or does not say which of its processes this one is.
    """
    described = _object(text) if text.strip() else {}
    if not described or _is_alone(described):
        return None
    addresses = _addresses(described.get("cluster"))
    role, index = _task(described.get("task"), addresses)
    return Cluster(addresses=addresses, role=role, index=index)


def tf_config_text(cluster: Cluster) -> str:
    """The value of TF_CONFIG from which `cluster_from` returns this cluster."""
    addresses = {role: list(of_role) for role, of_role in cluster.addresses.items()}
    return json.dumps({"cluster": addresses, "task": {"type": cluster.role, "index": cluster.index}})


def public_addresses(cluster: Cluster) -> tuple[str, ...]:
    """Addresses with a literal, globally routable IP, which the whole internet may be able to reach.

    TensorFlow's servers ask for no password and run what anyone sends them. Host names are not resolved.
    """
    return tuple(member.address for member in cluster.members() if _is_public(member.address))


def _object(text: str) -> Mapping[str, object]:
    try:
        described = json.loads(text, object_pairs_hook=_without_repetition)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise _refused(f"{_shown(text)} is not JSON ({error}); write it as {_EXAMPLE}") from error
    if not isinstance(described, dict):
        raise _refused(f"{_shown(described)} is not a JSON object; write it as {_EXAMPLE}")
    return described


def _without_repetition(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """A JSON object as a dict. (Of entries with one name, Python's parser would keep the last.)

    Raises:
      UserError: a name occurs twice.
    """
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _refused(
                f"{_shown(name)} occurs {names.count(name)} times in one object, but a name can have one value; "
                "write it once, a role with the list of all its addresses"
            )
    return dict(pairs)


def _is_alone(described: Mapping[str, object]) -> bool:
    """Whether the cluster is empty and the task is the first one: some platforms write this for one process."""
    if described.get("cluster") not in (None, {}):
        return False
    task = described.get("task") or {"type": WORKER, "index": 0}
    return isinstance(task, dict) and task.get("type") in RING_ROLES and str(task.get("index")) == "0"


def _addresses(described: object) -> dict[str, tuple[str, ...]]:
    """The cluster's addresses by role, without roles that have no process."""
    if not isinstance(described, dict) or not any(described.values()):
        raise _refused(
            f"its cluster is {_shown(described)}, but must hold addresses by role; write it as {_EXAMPLE}"
        )
    addresses = {role: _of_role(role, listed) for role, listed in described.items() if listed != []}
    _check_unique(addresses)
    num_chiefs = len(addresses.get(CHIEF, ()))
    if num_chiefs > 1:
        raise _refused(f"{num_chiefs} chiefs: a cluster has at most one; make the others workers")
    if SERVER in addresses and not num_chiefs:
        raise _refused(
            f"{len(addresses[SERVER])} of role 'ps' and no chief: parameter servers need a chief, which directs "
            'them; add "chief": ["host:port"], or pass --chief to launch.local'
        )
    return addresses


def _of_role(role: str, listed: object) -> tuple[str, ...]:
    """The addresses of one role, checked."""
    _check_role(role)
    if not isinstance(listed, list):
        raise _refused(
            f'{role!r} has {_shown(listed)}, but needs a list of addresses; write "{role}": ["host:port"]'
        )
    for index, address in enumerate(listed):
        if not isinstance(address, str) or _split(address) is None:
            raise _refused(
                f"the address of {role}:{index} is {_shown(address)}: an address is host:port with a port from 1 "
                "to 65535, 1 to 63 characters between the dots of a host's name, and an IPv6 host in brackets; "
                "write it as 'host:2222'"
            )
    return tuple(listed)


def _check_role(role: str) -> None:
    """Raises UserError if `role` is not a role of a cluster."""
    if role == "master":
        raise _refused("the cluster holds 'master': TensorFlow 2 has no such role; call it 'chief'")
    if role == EVALUATOR:
        raise _refused(
            "the cluster holds 'evaluator', but an evaluator is not part of the cluster, since no process "
            "connects "
            'to it; omit it there and keep its own task, {"type": "evaluator", "index": 0}'
        )
    if role not in _ROLES:
        raise _refused(f"the cluster holds {_shown(role)}, which is no role; use one of {', '.join(_ROLES)}")


def _check_unique(addresses: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError if two processes share an address."""
    seen = {}
    for role, of_role in addresses.items():
        for index, address in enumerate(of_role):
            name, host_and_port = f"{role}:{index}", _split(address)
            if host_and_port in seen:
                raise _refused(
                    f"{address!r} is the address of {seen[host_and_port]} and of {name}, but each process needs "
                    "its own; give one of them another port"
                )
            seen[host_and_port] = name


def _task(described: object, addresses: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    """This process's role and index, checked."""
    if not isinstance(described, dict) or not {"type", "index"} <= described.keys():
        raise _refused(
            f"its task is {_shown(described)}, but needs a type and an index, which say which process this is; "
            "add "
            '"task": {"type": "worker", "index": 0}'
        )
    role, index = described["type"], _index(described["index"])
    if role == EVALUATOR:
        return role, index
    if not isinstance(role, str) or role not in addresses:
        known = ", ".join(addresses)
        hint = "call it 'chief', there and in the cluster" if role == "master" else f"use one of {known}"
        raise _refused(f"the task's type is {_shown(role)}: the cluster has {known}; {hint}")
    if index >= len(addresses[role]):
        count = len(addresses[role])
        raise _refused(
            f"the task's index is {index}, but the cluster has {count} of role {role!r}, counted from 0; give 0 "
            f"to {count - 1}, or add its address"
        )
    return role, index


def _index(described: object) -> int:
    """The task's index; a string of digits is accepted, because some launchers write "0"."""
    if isinstance(described, str) and re.fullmatch(r"-?[0-9]{1,9}", described):
        described = int(described)
    # In Python, bool is a kind of int.
    if not isinstance(described, int) or isinstance(described, bool):
        raise _refused(
            f"the task's index is {_shown(described)}, but must be an integer; give 0 for the first process"
        )
    if described < 0:
        raise _refused(f"the task's index is {described}, but indices start at 0; give 0 for the first process")
    return described


def _split(address: str) -> tuple[str, int] | None:
    """(host, port), the host in lower case and IPv6 in its usual form; None if `address` is not valid."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    host = (match["ipv6"] or match["host"]).lower()
    if match["ipv6"]:
        ip = _ip(host)
        if ip is None:
            return None
        host = str(ip)
    elif not _NAME.fullmatch(host):
        return None
    return host, int(match["port"])


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(address: str) -> bool:
    host_and_port = _split(address)
    ip = _ip(host_and_port[0]) if host_and_port else None
    return ip is not None and ip.is_global


def _shown(value: object) -> str:
    """A value for an error message: one line, cut off if it is long."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _refused(why: str) -> UserError:
    return UserError(f"TF_CONFIG: {why}")
