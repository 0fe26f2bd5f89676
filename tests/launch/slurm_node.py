"""A Slurm cluster for the duration of a test: munge, a controller and one daemon a node, all on this machine.

    with slurm_nodes() as slurm:
        ended = slurm.run("srun", "-n2", sys.executable, "-m", "launch.train", cwd=folder)

The programs are in Debian's packages slurm-wlm and munge. The settings of an installed Slurm are never used.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest

from tests.launch.programs import LIMIT_SECONDS, Ended, environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
# Daemons may be in folders that are not on a user's PATH.
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_STOP_SECONDS = 20
HOST = socket.gethostname().partition(".")[0]
# Seconds between Slurm's SIGTERM and SIGKILL; Slurm's default is 30.
KILL_WAIT_SECONDS = 2
# Seconds that a requeued job waits; Slurm's default is 120. A step that takes longer to start is refused.
_CREDENTIAL_SECONDS = 15

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait={kill_wait}
MailProg=/bin/true
SchedulerParameters=sched_interval=1
# Each node has the number of CPUs below, regardless of the machine.
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _missing() -> str:
    """The reason why no Slurm can be started on this machine; '' if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


_skipped = pytest.mark.skipif(bool(_missing()), reason=_missing())


def needs_slurm(test):
    """Marks a test with real Slurm daemons: a full test, skipped where Slurm is not installed."""
    return pytest.mark.full(_skipped(test))


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A running Slurm cluster.

    Attributes:
      folder: the folder of its settings and logs.
    """

    folder: pathlib.Path

    def environment(self) -> dict[str, str]:
        """The environment in which srun, sbatch and so on use this Slurm."""
        inherited = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
        return inherited | {"PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, cwd: pathlib.Path | None = None) -> Ended:
        """Runs a command to its end."""
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def job(self, job_id: str) -> dict[str, str]:
        """Slurm's description of a job, by Slurm's names: JobState, Restarts, ExitCode and so on."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id)
        assert shown.code == 0, shown.err
        return dict(word.split("=", 1) for word in shown.out.split() if "=" in word)

    def log(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


@contextlib.contextmanager
def slurm_nodes(names: Sequence[str] = (HOST,), *, num_cpus: int = 4) -> Iterator[Slurm]:
    """Context manager: a Slurm cluster with these nodes; ends all its processes at the end.

    Args:
      names: the nodes. Only this machine's name is a reachable host; nodes with other names are daemons on this
        machine too, and suffice where nothing connects to them.
      num_cpus: CPUs of each node, regardless of the machine.
    """
    # A socket's path has at most about a hundred characters; pytest's folders are too long for that.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        slurm = Slurm(pathlib.Path(name))
        _write_settings(slurm.folder, names, num_cpus)
        daemons: list[subprocess.Popen] = []
        try:
            _start(slurm, names, daemons)
            yield slurm
        finally:
            _stop(slurm, daemons)


def wait_until(happened: Callable[[], bool], description: str, slurm: Slurm) -> None:
    """Returns when `happened` returns True; fails with Slurm's logs after LIMIT_SECONDS."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"{description}: not within {LIMIT_SECONDS} seconds; {slurm.log()}"
        time.sleep(0.1)


def _write_settings(folder: pathlib.Path, names: Sequence[str], num_cpus: int) -> None:
    controller_port, *ports = _free_ports(1 + len(names))
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={HOST} NodeAddr=127.0.0.1 Port={port} CPUs={num_cpus} State=UNKNOWN"
        for name, port in zip(names, ports, strict=True)
    )
    settings = _CONFIGURATION.format(
        host=HOST,
        controller_port=controller_port,
        folder=folder,
        nodes=nodes,
        kill_wait=KILL_WAIT_SECONDS,
        credential=_CREDENTIAL_SECONDS,
    )
    (folder / "slurm.conf").write_text(settings)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))


def _free_ports(count: int) -> list[int]:
    """Ports that no process listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(slurm: Slurm, names: Sequence[str], daemons: list[subprocess.Popen]) -> None:
    """Starts the daemons, appends each to `daemons`, and waits until jobs can run."""
    munge = {name: slurm.folder / f"munge.{name}" for name in ("key", "socket", "pid", "log", "seed")}
    files = [f"--{option}={munge[option.partition('-')[0]]}" for option in ("key-file", "socket", "pid-file")]
    files += [f"--log-file={munge['log']}", f"--seed-file={munge['seed']}"]
    # --force: munged refuses temporary folders, which others may write to.
    daemons.append(_daemon(slurm, "munged", "--foreground", "--force", *files))
    wait_until(munge["socket"].exists, "munge's socket", slurm)
    daemons.append(_daemon(slurm, "slurmctld", "-D"))
    for name in names:
        # Without -N, a daemon is the node with the machine's name.
        node = () if name == HOST else ("-N", name)
        daemons.append(_daemon(slurm, "slurmd", "-D", *node))

    def idle() -> bool:
        assert all(daemon.poll() is None for daemon in daemons), f"a daemon ended; {slurm.log()}"
        states = slurm.run("sinfo", "--noheader", "--Node", "--format=%T").out.split()
        return states == ["idle"] * len(names)

    wait_until(idle, "all nodes idle", slurm)


def _daemon(slurm: Slurm, *command: str) -> subprocess.Popen:
    with (slurm.folder / f"{command[0]}.out.log").open("a") as output:
        return subprocess.Popen(
            command,
            executable=shutil.which(command[0], path=_PATH),
            cwd=slurm.folder,
            env=slurm.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _stop(slurm: Slurm, daemons: Sequence[subprocess.Popen]) -> None:
    """Ends the daemons, the last one first, then the steps and tasks that they left running."""
    for daemon in reversed(daemons):
        daemon.terminate()
        try:
            daemon.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(timeout=_STOP_SECONDS)
    deadline = time.monotonic() + _STOP_SECONDS
    while left := processes_of(slurm):
        assert time.monotonic() < deadline, f"could not be killed: {left}"
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def processes_of(slurm: Slurm) -> list[psutil.Process]:
    """All running processes of this Slurm: daemons, steps and tasks."""
    return [process for process in psutil.process_iter() if _belongs_to(process, slurm)]


def _belongs_to(process: psutil.Process, slurm: Slurm) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            return False
        # A step's process overwrites its environment with its title, but has the node's log open.
        settings = process.environ().get("SLURM_CONF", "")
        files = [settings, *(file.path for file in process.open_files())]
        return any(slurm.folder in pathlib.Path(file).parents for file in files)
    return False
