"""A Slurm of one's own for as long as a test lasts: munge, a controller and a daemon a node, all on this machine.

    with slurm_nodes() as slurm:
        ended = slurm.run("srun", "-n2", sys.executable, "-m", "launch.train", cwd=folder)

Debian has the programs in slurm-wlm and munge. Nothing of an installed Slurm's settings is read or changed.
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
# Daemons lie where a user's PATH may not lead.
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_STOP_SECONDS = 20
HOST = socket.gethostname().partition(".")[0]
# What a task has between SIGTERM and SIGKILL where Slurm ends it; 30 as a rule.
KILL_WAIT_SECONDS = 2
# A job that was put back waits so long; 120 as a rule. A step that takes longer to start is refused.
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
# So many CPUs as stand below, whatever the machine has.
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _missing() -> str:
    """Why no Slurm can be started here; '' if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons want root"


needs_slurm = pytest.mark.skipif(bool(_missing()), reason=_missing())


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A Slurm that runs.

    Attributes:
      folder: where its settings and logs lie.
    """

    folder: pathlib.Path

    def environment(self) -> dict[str, str]:
        """In which srun, sbatch and the others speak to this Slurm."""
        kept = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
        return kept | {"PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, cwd: pathlib.Path | None = None) -> Ended:
        """A command from beginning to end."""
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, by Slurm's names: JobState, Restarts, ExitCode and so on."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        assert shown.code == 0, shown.err
        return dict(word.split("=", 1) for word in shown.out.split() if "=" in word)

    def log(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


@contextlib.contextmanager
def slurm_nodes(names: Sequence[str] = (HOST,), *, num_cpus: int = 4) -> Iterator[Slurm]:
    """Within, a Slurm has these nodes; every process of it is gone at the end.

    Args:
      names: only this machine's own name is a host that can be reached; nodes of other names are daemons here
        too, good for anything that makes no connection.
      num_cpus: of each node, real or not.
    """
    # Sockets' paths may have a hundred characters, more than pytest's folders leave.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        slurm = Slurm(pathlib.Path(name))
        _write_settings(slurm.folder, names, num_cpus)
        daemons: list[subprocess.Popen] = []
        try:
            _start(slurm, names, daemons)
            yield slurm
        finally:
            _stop(slurm, daemons)


def wait_until(happened: Callable[[], bool], what: str, slurm: Slurm) -> None:
    """Returns when it has happened; fails with Slurm's logs if it takes too long."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not in {LIMIT_SECONDS} seconds; {slurm.log()}"
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
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(slurm: Slurm, names: Sequence[str], daemons: list[subprocess.Popen]) -> None:
    """Starts the daemons, which are added to `daemons` one by one, and waits until jobs can run."""
    munge = {name: slurm.folder / f"munge.{name}" for name in ("key", "socket", "pid", "log", "seed")}
    files = [f"--{option}={munge[option.partition('-')[0]]}" for option in ("key-file", "socket", "pid-file")]
    files += [f"--log-file={munge['log']}", f"--seed-file={munge['seed']}"]
    # By force: munged would refuse a temporary folder, in which others may write.
    daemons.append(_daemon(slurm, "munged", "--foreground", "--force", *files))
    wait_until(munge["socket"].exists, "munge's socket", slurm)
    daemons.append(_daemon(slurm, "slurmctld", "-D"))
    for name in names:
        # Without -N a daemon is the node that has the machine's name.
        which = () if name == HOST else ("-N", name)
        daemons.append(_daemon(slurm, "slurmd", "-D", *which))

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
    """Ends the daemons, last one first, and then whatever they have left: steps and tasks outlive a slurmd."""
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
    """Every process of this Slurm that runs: daemons, steps and tasks."""
    return [process for process in psutil.process_iter() if _belongs_to(process, slurm)]


def _belongs_to(process: psutil.Process, slurm: Slurm) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            return False
        # A step's own process writes its title over its environment, but has the node's log open.
        settings = process.environ().get("SLURM_CONF", "")
        files = [settings, *(file.path for file in process.open_files())]
        return any(slurm.folder in pathlib.Path(file).parents for file in files)
    return False
