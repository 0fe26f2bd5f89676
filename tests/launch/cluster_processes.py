"""Processes of one cluster on this machine, started as a launcher would; none is left behind."""

import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from tests.launch.nursery import Forked, nursery
from tests.launch.programs import Ended, environment


class ClusterProcesses:
    """Context manager: runs the processes of a cluster, each with its own TF_CONFIG and named by a key."""

    def __init__(self, cluster: Mapping[str, Sequence[str]], cwd: pathlib.Path | None):
        """Args:
        cluster: addresses by role.
        cwd: the current folder of the processes.
        """
        self.cluster, self._cwd = cluster, cwd
        self.processes: dict[int | str, Forked] = {}

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.start_all()
        return self

    def start_all(self) -> None:
        """Starts the processes that run from the beginning."""
        raise NotImplementedError

    def run(
        self,
        key: int | str,
        words: Sequence[str],
        *,
        role: str,
        index: int,
        variables: Mapping[str, str],
        network: str | None = None,
    ) -> None:
        """Starts or restarts `python words...`.

        Args:
          key: name of the process in later calls.
          words: the words after `python`.
          role, index: role and index of the process in the cluster.
          variables: variables added to its environment.
          network: file of the network namespace that it runs in; None for this process's.
        """
        task = {"cluster": self.cluster, "task": {"type": role, "index": index}}
        env = environment() | {"TF_CONFIG": json.dumps(task)} | variables
        files = [self._file(key, stream) for stream in ("out", "err")]
        self.processes[key] = nursery().start(words, cwd=self._cwd, env=env, files=files, network=network)

    def _file(self, key: int | str, stream: str) -> str:
        return os.path.join(self._folder.name, f"{key}.{stream}")

    def end(self, key: int | str, limit_seconds: float) -> Ended:
        """Waits until a process has ended."""
        code = self.processes[key].wait(timeout=limit_seconds)
        return Ended(code, *(self.written(key, stream) for stream in ("out", "err")))

    def written(self, key: int | str, stream: str) -> str:
        """What a process has written so far to `stream`, 'out' or 'err'."""
        return pathlib.Path(self._file(key, stream)).read_text(errors="replace")

    def __exit__(self, *_) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(timeout=20)
        self._folder.cleanup()
