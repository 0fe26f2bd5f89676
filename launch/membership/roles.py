"""Who makes up a cluster on this machine, by numbers alone: names, addresses, and who waits for whom."""

import dataclasses
from collections.abc import Mapping

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, EVALUATOR, SERVER, WORKER, Cluster, Member


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """How many processes there are of each role.

    Attributes:
      workers: at least 1; a chief is one more.
      ps: parameter servers.
      chief, evaluator: whether there is one.
    """

    workers: int
    ps: int = 0
    chief: bool = False
    evaluator: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """As 'worker:1', in the order in which they are started."""
        return tuple(Member(role, index).name for role, count in self._counts() for index in range(count))

    @property
    def reporter(self) -> str:
        """The process that reports how far training is."""
        return self.names[0]

    @property
    def num_computing(self) -> int:
        """Processes that share the machine's cores: all but the parameter servers."""
        return len(self.names) - self.ps

    @property
    def trainers(self) -> tuple[str, ...]:
        """Those who take steps together, and notice when one of them stands still."""
        return self._named(CHIEF, WORKER)

    @property
    def replaceable(self) -> tuple[str, ...]:
        """Those without whom the others go on until there is another: workers that parameters servers serve."""
        return self._named(WORKER) if self.ps and self.chief else ()

    def awaited(self) -> Mapping[str, tuple[str, ...]]:
        """Those that serve until they are told to end, and whose ends each of them waits for.

        A parameter server serves the chief, the workers and the evaluator; a worker beside parameter servers
        serves the chief, if there is one. In a ring nobody serves.
        """
        found = {name: self._named(CHIEF, WORKER, EVALUATOR) for name in self._named(SERVER)}
        if self.ps and self.chief:
            found |= {name: self._named(CHIEF) for name in self._named(WORKER)}
        return found

    def clusters(self) -> tuple[Cluster, ...]:
        """The cluster as each of its processes sees it, in the order of `names`, on ports that are free now."""
        members = [(role, count) for role, count in self._counts() if role != EVALUATOR and count]
        free = iter(free_addresses(sum(count for _, count in members)))
        addresses = {role: tuple(next(free) for _ in range(count)) for role, count in members}
        return tuple(
            Cluster(addresses=addresses, role=role, index=index)
            for role, count in self._counts()
            for index in range(count)
        )

    def _counts(self) -> tuple[tuple[str, int], ...]:
        return (
            (CHIEF, int(self.chief)),
            (WORKER, self.workers),
            (SERVER, self.ps),
            (EVALUATOR, int(self.evaluator)),
        )

    def _named(self, *roles: str) -> tuple[str, ...]:
        return tuple(name for name in self.names if name.partition(":")[0] in roles)
