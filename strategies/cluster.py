"""Who takes part: the processes of a cluster by role and rank, and which of them this one is."""

import dataclasses
import socket
from collections.abc import Mapping

CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
# In the order in which a ring numbers them.
RING_ROLES = (CHIEF, WORKER)


@dataclasses.dataclass(frozen=True)
class Member:
    """One process.

    Attributes:
      role: 'chief', 'worker', 'ps' or 'evaluator'.
      index: its place among those of its role, from 0.
      address: 'host:port' it listens on; '' for an evaluator, which nobody talks to.
    """

    role: str
    index: int
    address: str = ""

    @property
    def name(self) -> str:
        """As 'worker:1'."""
        return f"{self.role}:{self.index}"

    @property
    def host(self) -> str:
        """Of its address, an IPv6 one without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Of its address."""
        return int(self.address.rpartition(":")[2])

    @property
    def family(self) -> socket.AddressFamily:
        """What a socket for its address is made with."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes that train together, as TF_CONFIG names them.

    Attributes:
      addresses: 'host:port' of every process by role, in order; an evaluator is not among them.
      role, index: which process this one is.
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
        """The processes of some roles (all of them if none is named), role by role."""
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
    def rank(self) -> int:
        """This process's place in the ring.

        Raises:
          ValueError: it is none of the ring's.
        """
        return self.ring.index(self.this)
