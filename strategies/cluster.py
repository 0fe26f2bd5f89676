"""The members of a cluster by role and rank, and the membership of this process."""

import dataclasses
import ipaddress
import socket
from collections.abc import Mapping

CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
# Roles of a ring's members, in the order of their ranks.
RING_ROLES = (CHIEF, WORKER)


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of a cluster.

    Attributes:
      role: 'chief', 'worker', 'ps' or 'evaluator'.
      index: index among the members of its role.
      address: 'host:port' on which it listens; '' for an evaluator, which accepts no connections.
    """

    role: str
    index: int
    address: str = ""

    @property
    def name(self) -> str:
        """Role and index, for example 'worker:1'."""
        return f"{self.role}:{self.index}"

    @property
    def host(self) -> str:
        """Host of the address in lower case; an IPv6 address without its brackets."""
        return self.address.rpartition(":")[0].strip("[]").lower()

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect to the address."""
        found = self._loopbacks()
        return bool(found) and all(found)

    @property
    def listening_host(self) -> str:
        """Host to bind this member's socket to, so that other machines can reach it; '' for all addresses.

        On the machine itself its name may resolve to a loopback address (127.0.1.1 in Debian's /etc/hosts), alone
        or before others, and to another address on all other machines. Or it resolves to several addresses, as
        with a second network, and other machines know or reach only one of them. A socket bound to a name has only
        its first address.
        """
        if self._is_always_local:
            return self.host
        own = [ip for family, (ip, *_) in self._socket_addresses() if family == self.family]
        return "" if any(self._loopbacks()) or len(own) > 1 else self.host

    @property
    def _is_always_local(self) -> bool:
        """Whether the host is an IP address or 'localhost', not a name that others may resolve differently."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return self.host == "localhost"
        return True

    @property
    def is_here(self) -> bool:
        """Whether the address is one of this machine's; in a container, of the container's network."""
        return any(map(_can_bind, self._socket_addresses()))

    @property
    def port(self) -> int:
        """Port of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def family(self) -> socket.AddressFamily:
        """Address family of a socket for the address: IPv6 also for a name that has no other addresses."""
        if ":" in self.host:
            return socket.AF_INET6
        families = {family for family, _ in self._socket_addresses()}
        return socket.AF_INET6 if families == {socket.AF_INET6} else socket.AF_INET

    def _loopbacks(self) -> list[bool]:
        """For each IP address of the host, whether it is a loopback address."""
        ips = [ip.partition("%")[0] for _, (ip, *_) in self._socket_addresses()]
        return [ipaddress.ip_address(ip).is_loopback for ip in ips]

    def _socket_addresses(self) -> list[tuple[socket.AddressFamily, tuple]]:
        """Family and address of a socket, with any free port, for each IP of the host; [] for an unknown name."""
        try:
            return [(found[0], found[4]) for found in socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError):
            return []


def _can_bind(family_and_address: tuple[socket.AddressFamily, tuple]) -> bool:
    """Whether this process can bind a socket to the address."""
    family, address = family_and_address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
    except OSError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The members of a training cluster, as in TF_CONFIG, and the membership of this process.

    Attributes:
      addresses: by role, 'host:port' of every member in the order of their indices; without evaluators.
      role, index: role and index of this process.
    """

    addresses: Mapping[str, tuple[str, ...]]
    role: str
    index: int

    @property
    def this(self) -> Member:
        """This process."""
        own = self.addresses.get(self.role, ())
        return Member(self.role, self.index, own[self.index] if self.index < len(own) else "")

    def members(self, *roles: str) -> tuple[Member, ...]:
        """The members of the given roles (without arguments: of all roles), role by role."""
        return tuple(
            Member(role, index, address)
            for role in roles or tuple(self.addresses)
            for index, address in enumerate(self.addresses.get(role, ()))
        )

    @property
    def ring(self) -> tuple[Member, ...]:
        """Chief and workers in the order of their ranks."""
        return self.members(*RING_ROLES)

    @property
    def computing(self) -> tuple[Member, ...]:
        """The members with towers: the workers of parameter servers, or the whole ring."""
        return self.members(WORKER) if self.addresses.get(SERVER) else self.ring

    @property
    def rank(self) -> int:
        """Index of this process in `ring`.

        Raises:
          ValueError: this process is not in the ring.
        """
        return self.ring.index(self.this)
