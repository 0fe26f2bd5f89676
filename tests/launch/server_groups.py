"""The processes of a parameter-server cluster on this machine, named as 'worker:1'."""

import os
import pathlib
from collections.abc import Mapping, Sequence

from launch.membership.free_ports import free_addresses
from tests.launch.cluster_processes import ClusterProcesses
from tests.launch.nursery import nursery
from tests.launch.programs import Ended


class ServerGroup(ClusterProcesses):
    """Context manager: runs `python command...` in each process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int,
        servers: int,
        cwd: pathlib.Path | None = None,
        missing: Sequence[str] = (),
        more_flags: Mapping[str, Sequence[str]] | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        with_this_process: bool = False,
    ):
        """Args:
        command: the command of all processes.
        workers, servers: the numbers of workers and servers.
        cwd: the current folder of the processes.
        missing: names ('ps:1') of processes that are not started.
        more_flags: by name, flags added to the command.
        variables: by name, variables added to the environment at the first start.
        with_this_process: whether this process is a member too; all are then in its network.
        """
        counts = {"chief": 1, "worker": workers, "ps": servers}
        free = iter(free_addresses(sum(counts.values())))
        super().__init__({role: [next(free) for _ in range(count)] for role, count in counts.items()}, cwd)
        self._command, self._missing = command, missing
        self._more_flags, self._variables = more_flags or {}, variables or {}
        self._network = f"/proc/{os.getpid()}/ns/net" if with_this_process and nursery().inside else None
        self.names = [f"{role}:{index}" for role, count in counts.items() for index in range(count)]

    def start_all(self) -> None:
        for name in self.names:
            if name not in self._missing:
                self.start(name, **self._variables.get(name, {}))

    def start(self, name: str, *, as_name: str = "", **variables: str) -> None:
        """Starts or restarts a process; under another name if one is given."""
        role, index = name.split(":")
        words = [*self._command, *self._more_flags.get(name, ())]
        self.run(as_name or name, words, role=role, index=int(index), variables=variables, network=self._network)

    def ends(self, limit_seconds: float) -> dict[str, Ended]:
        """Waits until all started processes have ended; by name."""
        return {name: self.end(name, limit_seconds) for name in self.processes}
