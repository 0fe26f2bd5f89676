"""The workers of a ring on this machine, named by their ranks."""

import pathlib
from collections.abc import Mapping, Sequence

from launch.membership.free_ports import free_addresses
from tests.launch.cluster_processes import ClusterProcesses
from tests.launch.programs import TINY, Ended

# A short training; each process is a worker with one tower.
TRAIN = (
    "-m",
    "launch.train",
    *(flag for flag in TINY if not flag.startswith("--num_towers")),
    "--strategy=ring",
    "--num_towers=1",
    "--directory=run",
)


class Workers(ClusterProcesses):
    """Context manager: runs `python command...` for each rank."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        addresses: Sequence[str] | None = None,
        cwd: pathlib.Path | None = None,
        missing: Sequence[int] = (),
        environments: Mapping[int, Mapping[str, str]] | None = None,
        inside: Mapping[int, Sequence[str]] | None = None,
    ):
        """Args:
        commands: the command of each rank.
        addresses: the addresses to listen on; None for free ones.
        cwd: the current folder of the processes.
        missing: ranks of the cluster that are not started.
        environments: by rank, variables added to its environment.
        inside: by rank, words before `python` that run it elsewhere, in the same process.
        """
        self.addresses = list(addresses or free_addresses(len(commands)))
        super().__init__({"worker": self.addresses}, cwd)
        self._commands, self._missing = commands, missing
        self._environments, self._inside = environments or {}, inside or {}

    def start_all(self) -> None:
        for rank, command in enumerate(self._commands):
            if rank not in self._missing:
                variables, inside = self._environments.get(rank, {}), self._inside.get(rank, ())
                self.run(rank, command, role="worker", index=rank, variables=variables, inside=inside)

    def ends(self, limit_seconds: float) -> list[Ended]:
        """Waits until all started processes have ended; in the order of their ranks."""
        return [self.end(rank, limit_seconds) for rank in self.processes]
