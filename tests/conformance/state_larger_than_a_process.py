"""Trains a state of 4 GiB in processes limited to less memory each, saves and resumes it; needs root and Linux.

python -m tests.conformance.state_larger_than_a_process [--state_gib=4] [--limit_gib=3] [--servers=3]

The model is the recommender of drawn clicks: eight tables, Adam, so a third of the state is parameters.
Each process runs in a memory control group of its own (version 1) with that limit. The kernel enforces it: it
kills a process that needs more. The processes are forks of one that has imported TensorFlow, so some 0.2 GiB of
imported objects don't count. First one process trains alone in such a group, and must be killed. Then the chief, a
worker and the servers train until a checkpoint is written, and end by SIGTERM; the same command resumes.

Prints a line for each process: its peak resident memory, shared libraries included. Exits with 1 if the process
alone was not killed, or if a process of the cluster was. With 4 GiB it takes some minutes, 9 GiB of memory and
12 GiB of disk.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from launch.binary import INTERRUPTED
from launch.membership.free_ports import free_addresses
from tests.launch.nursery import Nursery
from tests.launch.programs import environment

GIB = 2**30
TABLES, WIDTH, COPIES = 8, 64, 3
_GROUPS = pathlib.Path("/sys/fs/cgroup/memory")
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """The settings of a trial.

    Attributes:
      state_bytes: parameters and slots of all tables.
      limit_bytes: memory limit of each process.
      servers: number of servers.
      directory: folder of the run.
      nursery: starts the processes.
      timeout_seconds: time limit of each part of the trial.
    """

    state_bytes: int
    limit_bytes: int
    servers: int
    directory: pathlib.Path
    nursery: Nursery
    timeout_seconds: float

    def command(self, *flags: str) -> list[str]:
        """The words after `python` of each process."""
        rows = -(-self.state_bytes // (COPIES * TABLES * WIDTH * 4))
        return [
            *("-m", "launch.train", "--task=clicks", "--optimizer=adam", "--learning_rate=0.001"),
            *(f"--click_tables={TABLES}", f"--click_rows={rows}", f"--click_width={WIDTH}", "--num_towers=1"),
            *("--batch_size=128", "--steps=1000000", "--checkpoint_every_steps=5", "--keep_checkpoints=1"),
            *(f"--directory={self.directory}", *flags),
        ]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, its peak resident memory, and its output."""

    code: int
    peak_bytes: int
    output: str


def nursery() -> contextlib.closing[Nursery]:
    """Context manager: the nursery of a trial, whose malloc gives large blocks back instead of keeping them."""
    return contextlib.closing(Nursery(MALLOC_MMAP_THRESHOLD_=str(2**20)))


class Limited:
    """A process in a memory control group of its own."""

    def __init__(self, name: str, trial: Trial, words: Sequence[str], variables: Mapping[str, str]):
        self._group = _GROUPS / f"towers-trial-{os.getpid()}-{name.replace(':', '')}"
        self._group.mkdir()
        (self._group / "memory.limit_in_bytes").write_text(str(trial.limit_bytes))
        self._output = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        env = environment() | variables
        self.process = trial.nursery.start(words, cwd=None, env=env, files=[self._output.name] * 2)
        (self._group / "cgroup.procs").write_text(str(self.process.pid))
        self._peak_bytes = 0

    def look(self) -> bool:
        """Records the process's memory; returns whether it runs."""
        # A process that has ended has no status file, or one without memory.
        with contextlib.suppress(OSError, TypeError):
            status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
            self._peak_bytes = max(self._peak_bytes, int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024)
        return self.process.poll() is None

    def ended(self) -> Ended:
        """Kills the process if it runs, and removes its group."""
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait(20)
        found = Ended(code, self._peak_bytes, self._output.read())
        self._output.close()
        self._group.rmdir()
        return found


def alone(trial: Trial) -> Ended:
    """Runs one process with all of the state until it ends or has written a checkpoint."""
    running = Limited("alone", trial, trial.command("--strategy=towers"), {})
    try:
        _wait(trial, [running], after_step=-1)
    finally:
        found = running.ended()
    return found


def together(trial: Trial, *, after_step: int = -1) -> tuple[int, dict[str, Ended]]:
    """Runs chief, worker and servers until a step after `after_step` is saved; that step, and how each ended."""
    names = ["chief:0", "worker:0", *(f"ps:{index}" for index in range(trial.servers))]
    addresses = dict(zip(names, free_addresses(len(names)), strict=True))
    cluster: dict[str, list[str]] = {}
    for name, address in addresses.items():
        cluster.setdefault(name.split(":")[0], []).append(address)
    words = trial.command("--strategy=ps", "--engine=own", "--sparse_updates=lazy")
    running: dict[str, Limited] = {}
    found: dict[str, Ended] = {}
    try:
        for name in names:
            role, index = name.split(":")
            task = {"cluster": cluster, "task": {"type": role, "index": int(index)}}
            running[name] = Limited(name, trial, words, {"TF_CONFIG": json.dumps(task)})
        _wait(trial, list(running.values()), after_step=after_step)
        running["chief:0"].process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + trial.timeout_seconds
        while any([one.look() for one in running.values()]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    finally:
        for name, one in running.items():
            found[name] = one.ended()
    return saved_step(trial), found


def _wait(trial: Trial, running: Sequence[Limited], *, after_step: int) -> None:
    """Waits for a checkpoint after `after_step`, or until a process has ended."""
    deadline = time.monotonic() + trial.timeout_seconds
    while all([one.look() for one in running]) and saved_step(trial) <= max(after_step, 0):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no checkpoint after {trial.timeout_seconds:g} seconds")
        time.sleep(_POLL_SECONDS)


def saved_step(trial: Trial) -> int:
    """The step of the newest checkpoint; -1 if there is none."""
    found = (trial.directory / "checkpoints").glob("step-*.index")
    return max((int(path.stem.removeprefix("step-")) for path in found), default=-1)


def saved_bytes(trial: Trial) -> int:
    """The size of the newest checkpoint."""
    return sum(
        path.stat().st_size for path in (trial.directory / "checkpoints").glob(f"step-{saved_step(trial)}.*")
    )


@contextlib.contextmanager
def _printed(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"{what}:", flush=True)
    yield
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Runs the trial of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state_gib", type=float, default=4.0)
    parser.add_argument("--limit_gib", type=float, default=3.0)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--timeout_seconds", type=float, default=900.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, nursery() as started:
        trial = Trial(
            state_bytes=int(chosen.state_gib * GIB),
            limit_bytes=int(chosen.limit_gib * GIB),
            servers=chosen.servers,
            directory=pathlib.Path(folder) / "run",
            nursery=started,
            timeout_seconds=chosen.timeout_seconds,
        )
        with _printed(f"one process, limit {chosen.limit_gib:g} GiB"):
            found = alone(trial)
            is_well = found.code == -signal.SIGKILL
            print(f"  {'killed' if is_well else 'NOT killed'} at {found.peak_bytes / GIB:.2f} GiB")
        step = -1
        for what in ("from step 0", "resumed"):
            with _printed(f"a chief, a worker and {trial.servers} servers, each with that limit, {what}"):
                before = step
                step, ends = together(trial, after_step=before)
                for name, end in ends.items():
                    print(f"  {name}: at most {end.peak_bytes / GIB:.2f} GiB, exit code {end.code}")
                    if end.code != INTERRUPTED:
                        print(end.output[-2000:])
                print(f"  a checkpoint of step {step}: {saved_bytes(trial) / GIB:.2f} GiB")
                resumed = before < 0 or f"resumed at step {before}" in ends["chief:0"].output
                is_well &= resumed and step > before and all(end.code == INTERRUPTED for end in ends.values())
    print("passed" if is_well else "FAILED")
    return 0 if is_well else 1


if __name__ == "__main__":
    # SIGTERM raises an exception, so that no process stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
