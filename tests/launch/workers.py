"""The workers of a ring on this machine, named by their ranks."""

import pathlib
from collections.abc import Mapping, Sequence

from launch.membership.free_ports import free_addresses
from tests.launch.cluster_processes import ClusterProcesses
from tests.launch.programs import ROOT, TINY, Ended

# A short training; each process is a worker with one tower.
TRAIN = (
    "-m",
    "launch.train",
    *(flag for flag in TINY if not flag.startswith("--num_towers")),
    "--strategy=ring",
    "--num_towers=1",
    "--directory=run",
)
# A network of one layer, for tests that end the run early: 40 milliseconds a step, and far more steps than needed.
LONG = (
    str(ROOT / "tests" / "launch" / "slow_input_program.py"),
    "--strategy=ring",
    "--num_towers=1",
    "--steps=100000",
    "--learning_rate=0.01",
    "--checkpoint_every_steps=10",
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
        networks: Mapping[int, str] | None = None,
    ):
        """Args:
        commands: the command of each rank.
        addresses: the addresses to listen on; None for free ones.
        cwd: the current folder of the processes.
        missing: ranks of the cluster that are not started.
        environments: by rank, variables added to its environment.
        networks: by rank, the file of the network namespace that it runs in.
        """
        self.addresses = list(addresses or free_addresses(len(commands)))
        super().__init__({"worker": self.addresses}, cwd)
        self._commands, self._missing = commands, missing
        self._environments, self._networks = environments or {}, networks or {}

    def start_all(self) -> None:
        for rank, command in enumerate(self._commands):
            if rank not in self._missing:
                variables, network = self._environments.get(rank, {}), self._networks.get(rank)
                self.run(rank, command, role="worker", index=rank, variables=variables, network=network)

    def ends(self, limit_seconds: float) -> list[Ended]:
        """Waits until all started processes have ended; in the order of their ranks."""
        return [self.end(rank, limit_seconds) for rank in self.processes]
