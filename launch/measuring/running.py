"""Runs a case in fresh processes and samples their memory."""

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence

import psutil

from launch.measuring.case import Case
from launch.membership.free_ports import free_addresses
from launch.membership.tf_config import tf_config_text
from strategies.cluster import CHIEF, SERVER, WORKER, Cluster

_CASE_SECONDS = 300
_SAMPLE_SECONDS = 0.2


def run_case(case: Case) -> dict:
    """Runs a case; returns the JSON object that it prints last, with 'peak_memory_bytes' of all its processes.

    Raises:
      RuntimeError: a process failed; the message contains the last line of its stderr.
    """
    processes = [
        subprocess.Popen(
            case.command,
            env={**environment, **case.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments(case.processes)
    ]
    with MemoryWatch([process.pid for process in processes]) as memory:
        try:
            # The few lines of each process fit into its pipes, so the processes can be read one after another.
            written = [process.communicate(timeout=_CASE_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, complaints) in zip(processes, written, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"{case.name} failed: {(complaints.strip().splitlines() or ['no message'])[-1]}")
    found = json.loads(written[0][0].strip().splitlines()[-1])
    return found | {"peak_memory_bytes": memory.peak_bytes}


def environments(processes: Mapping[str, int]) -> list[dict[str, str]]:
    """The environment of each process of a case; the chief's, or else worker 0's, is the first."""
    shared = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    shared.pop("TF_CONFIG", None)
    if not processes:
        return [shared]
    addresses = {role: tuple(free_addresses(count)) for role, count in processes.items()}
    clusters = [
        Cluster(addresses=addresses, role=role, index=index)
        for role in (CHIEF, WORKER, SERVER)
        for index in range(processes.get(role, 0))
    ]
    return [{**shared, "TF_CONFIG": tf_config_text(cluster)} for cluster in clusters]


class MemoryWatch:
    """Context manager: while active, samples the resident memory of processes and their descendants.

    Attributes:
      peak_bytes: the largest sum so far; a page that several processes share counts once for each.
    """

    def __init__(self, pids: Sequence[int]):
        self._pids, self.peak_bytes = pids, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, sum(map(_tree_bytes, self._pids)))


def _tree_bytes(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        return sum(_own_bytes(each) for each in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def _own_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
