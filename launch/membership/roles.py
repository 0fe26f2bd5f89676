"""The processes of a cluster on this machine, from their counts: names, addresses, and which serve others."""

import dataclasses
from collections.abc import Mapping

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, EVALUATOR, SERVER, WORKER, Cluster, Member


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """Number of processes of each role.

    Attributes:
      workers: number of workers, at least 1, not counting the chief.
      ps: number of parameter servers.
      chief: whether there is a chief.
      evaluator: whether there is an evaluator.
    """

    workers: int
    ps: int = 0
    chief: bool = False
    evaluator: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the processes, as 'worker:1', in the order in which they are started."""
        return tuple(Member(role, index).name for role, count in self._counts() for index in range(count))

    @property
    def reporter(self) -> str:
        """Name of the process that reports the progress of training."""
        return self.names[0]

    @property
    def num_computing(self) -> int:
        """Number of processes that share the machine's cores."""
        return len(self.computing)

    @property
    def computing(self) -> tuple[str, ...]:
        """Names of the processes that share the machine's cores: all except parameter servers and their chief.

        The chief of servers computes only evaluations, while the workers pause.
        """
        others = self._named(SERVER, CHIEF) if self.ps else ()
        return tuple(name for name in self.names if name not in others)

    @property
    def trainers(self) -> tuple[str, ...]:
        """Names of the processes that take steps, and that notice if one of them hangs."""
        return self._named(CHIEF, WORKER)

    @property
    def replaceable(self) -> tuple[str, ...]:
        """Names of the processes that can be replaced while the others continue: workers of parameter servers."""
        return self._named(WORKER) if self.ps and self.chief else ()

    def awaited(self) -> Mapping[str, tuple[str, ...]]:
        """For each process that serves others until it is stopped: the names of the processes that it serves.

        The launcher stops such a process once those processes have ended. A parameter server serves the chief,
        the workers and the evaluator; a worker of parameter servers serves the chief, if there is one. In a ring
        no process serves others.
        """
        found = {name: self._named(CHIEF, WORKER, EVALUATOR) for name in self._named(SERVER)}
        if self.ps and self.chief:
            found |= {name: self._named(CHIEF) for name in self._named(WORKER)}
        return found

    def followed(self) -> Mapping[str, tuple[str, ...]]:
        """For each process that no other one needs: the names of the processes that it follows.

        An evaluator follows those that drive training, whose checkpoints it reads: the chief of parameter servers,
        else all trainers.
        """
        drivers = self._named(CHIEF) if self.ps and self.chief else self.trainers
        return {name: drivers for name in self._named(EVALUATOR)}

    def clusters(self) -> tuple[Cluster, ...]:
        """The cluster as each process sees it, in the order of `names`, with ports that are free now."""
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
