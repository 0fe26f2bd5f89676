"""Processes of one cluster on this machine, as a launcher would start them; none is left behind."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from launch.free_ports import free_addresses
from tests.launch.programs import TINY, Ended, environment

# A small training of which each process is a worker with one tower.
TRAIN = (
    "-m",
    "launch.train",
    *(flag for flag in TINY if not flag.startswith("--num_towers")),
    "--strategy=ring",
    "--num_towers=1",
    "--directory=run",
)


class Workers:
    """Within, `python command...` runs for each rank, told by TF_CONFIG who the others are."""

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
        commands: one a rank.
        addresses: where they listen; None for free ones.
        cwd: where they run.
        missing: ranks that the cluster has and that are not started.
        environments: what more some ranks have in theirs.
        inside: the words before `python` of some ranks, which put it elsewhere; the process stays the same.
        """
        self._commands, self._cwd, self._missing = commands, cwd, missing
        self._environments, self._inside = environments or {}, inside or {}
        self.addresses = list(addresses or free_addresses(len(commands)))
        self.processes: list[subprocess.Popen | None] = []

    def __enter__(self) -> "Workers":
        self._folder = tempfile.TemporaryDirectory()
        for rank, command in enumerate(self._commands):
            self.processes.append(None if rank in self._missing else self._started(rank, command))
        return self

    def _started(self, rank: int, command: Sequence[str]) -> subprocess.Popen:
        task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": rank}}
        told = environment() | {"TF_CONFIG": json.dumps(task)} | self._environments.get(rank, {})
        words = [*self._inside.get(rank, ()), sys.executable, *command]
        with open(self._file(rank, "out"), "wb") as out, open(self._file(rank, "err"), "wb") as err:
            return subprocess.Popen(words, cwd=self._cwd, env=told, stdout=out, stderr=err)

    def _file(self, rank: int, which: str) -> str:
        return os.path.join(self._folder.name, f"{rank}.{which}")

    def end(self, rank: int, limit_seconds: float) -> Ended:
        """Waits for one rank's end."""
        code = self.processes[rank].wait(timeout=limit_seconds)
        return Ended(code, *(self.written(rank, which) for which in ("out", "err")))

    def written(self, rank: int, which: str) -> str:
        """What a rank has written so far to 'out' or 'err'."""
        return pathlib.Path(self._file(rank, which)).read_text(errors="replace")

    def ends(self, limit_seconds: float) -> list[Ended]:
        """Waits for all that were started, by rank."""
        return [self.end(rank, limit_seconds) for rank, process in enumerate(self.processes) if process]

    def __exit__(self, *_) -> None:
        for process in self.processes:
            if process is not None:
                process.kill()
                process.wait(timeout=20)
        self._folder.cleanup()
