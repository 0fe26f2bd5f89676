"""Processes of one cluster on this machine, as a launcher would start them; none is left behind."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from tests.launch.nursery import Forked, nursery
from tests.launch.programs import Ended, environment


class ClusterProcesses:
    """Within, processes run that TF_CONFIG tells who the others are, each known by a key."""

    def __init__(self, cluster: Mapping[str, Sequence[str]], cwd: pathlib.Path | None):
        """Args:
        cluster: addresses by role.
        cwd: where they run.
        """
        self.cluster, self._cwd = cluster, cwd
        self.processes: dict[int | str, subprocess.Popen | Forked] = {}

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.start_all()
        return self

    def start_all(self) -> None:
        """Starts those that are there from the beginning."""
        raise NotImplementedError

    def run(
        self,
        key: int | str,
        words: Sequence[str],
        *,
        role: str,
        index: int,
        variables: Mapping[str, str],
        inside: Sequence[str] = (),
    ) -> None:
        """Starts `python words...`, for the first time or again.

        Args:
          key: of the process from now on.
          words: behind `python`.
          role, index: which of the cluster it is.
          variables: what more it has in its environment.
          inside: the words before `python`, which put it elsewhere; the process stays the same.
        """
        task = {"cluster": self.cluster, "task": {"type": role, "index": index}}
        told = environment() | {"TF_CONFIG": json.dumps(task)} | variables
        files = [self._file(key, which) for which in ("out", "err")]
        if inside:
            with open(files[0], "ab") as out, open(files[1], "ab") as err:
                words = [*inside, sys.executable, *words]
                self.processes[key] = subprocess.Popen(words, cwd=self._cwd, env=told, stdout=out, stderr=err)
        else:
            self.processes[key] = nursery().start(words, cwd=self._cwd, env=told, files=files)

    def _file(self, key: int | str, which: str) -> str:
        return os.path.join(self._folder.name, f"{key}.{which}")

    def end(self, key: int | str, limit_seconds: float) -> Ended:
        """Waits for the end of one."""
        code = self.processes[key].wait(timeout=limit_seconds)
        return Ended(code, *(self.written(key, which) for which in ("out", "err")))

    def written(self, key: int | str, which: str) -> str:
        """What one has written so far to 'out' or 'err'."""
        return pathlib.Path(self._file(key, which)).read_text(errors="replace")

    def __exit__(self, *_) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(timeout=20)
        self._folder.cleanup()
