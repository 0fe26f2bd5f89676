"""The processes of a parameter-server group on this machine, each by its name; none is left behind."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from launch.free_ports import free_addresses
from tests.launch.nursery import Forked, Nursery
from tests.launch.programs import Ended, environment


class ServerGroup:
    """Within, `python command...` runs for each process, told by TF_CONFIG who the others are."""

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
        nursery: Nursery | None = None,
    ):
        """Args:
        command: the same for all.
        workers, servers: how many there are.
        cwd: where they run.
        missing: names ('ps:1') of those that are not started.
        more_flags: behind the command of some, by name.
        variables: what more some have in their environment, by name, when they are first started.
        nursery: starts them; None for whole new processes.
        """
        self._command, self._cwd, self._missing = command, cwd, missing
        self._more_flags, self._variables, self._nursery = more_flags or {}, variables or {}, nursery
        counts = {"chief": 1, "worker": workers, "ps": servers}
        free = iter(free_addresses(sum(counts.values())))
        self.cluster = {role: [next(free) for _ in range(count)] for role, count in counts.items()}
        self.names = [f"{role}:{index}" for role, count in counts.items() for index in range(count)]
        self.processes: dict[str, subprocess.Popen | Forked] = {}

    def __enter__(self) -> "ServerGroup":
        self._folder = tempfile.TemporaryDirectory()
        for name in self.names:
            if name not in self._missing:
                self.start(name, **self._variables.get(name, {}))
        return self

    def start(self, name: str, **variables: str) -> None:
        """Starts one, for the first time or again."""
        role, index = name.split(":")
        task = {"cluster": self.cluster, "task": {"type": role, "index": int(index)}}
        told = environment() | {"TF_CONFIG": json.dumps(task)} | variables
        words = [*self._command, *self._more_flags.get(name, ())]
        if self._nursery is not None:
            out, err = self._file(name, "out"), self._file(name, "err")
            self.processes[name] = self._nursery.start(words, cwd=self._cwd, env=told, out=out, err=err)
            return
        with open(self._file(name, "out"), "ab") as out, open(self._file(name, "err"), "ab") as err:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *words], cwd=self._cwd, env=told, stdout=out, stderr=err
            )

    def _file(self, name: str, which: str) -> str:
        return os.path.join(self._folder.name, f"{name}.{which}")

    def end(self, name: str, limit_seconds: float) -> Ended:
        """Waits for the end of one."""
        code = self.processes[name].wait(timeout=limit_seconds)
        return Ended(code, *(self.written(name, which) for which in ("out", "err")))

    def ends(self, limit_seconds: float) -> dict[str, Ended]:
        """Waits for all that were started, by name."""
        return {name: self.end(name, limit_seconds) for name in self.processes}

    def written(self, name: str, which: str) -> str:
        """What one has written so far to 'out' or 'err'."""
        return pathlib.Path(self._file(name, which)).read_text(errors="replace")

    def __exit__(self, *_) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(timeout=20)
        self._folder.cleanup()
