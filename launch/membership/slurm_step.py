"""The ring that one `srun` starts: every task of the step a worker, in the order of Slurm's ranks.

Each task works it out alone from its environment, so that all must come to the same ports without a word:

    port = 20000 + 64 * ((job + 20 * step) mod 199) + the task's number on its node

20000 to 32735: below what Linux gives to outgoing connections (from 32768). The first steps of 199 jobs in a row
share no port, nor do the first ten steps of 19 jobs in a row.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from launch.membership.hostlist import expand_counts, expand_hosts
from strategies.cluster import WORKER, Cluster
from towers.errors import UserError

FIRST_PORT = 20000
TASKS_OF_A_NODE = 64
_NUM_BLOCKS = 199
_BLOCKS_BETWEEN_STEPS = 20

# Slurm counts the steps that no srun started (a batch script, a shell of salloc) down from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFF00

_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_WAY_OUT = "start it by srun as Slurm left the environment, or set TF_CONFIG, which goes before it"


def cluster_from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """The step that this process is a task of; None outside of one, and in one of a single task.

    A batch script has the variables of its job, the number of tasks among them, and is itself no task.

    Raises:
      UserError: Slurm's variables are missing, malformed or don't agree.
    """
    if not _in_step(environ):
        return None
    num_tasks = _number(environ, *_NUM_TASKS)
    if num_tasks < 2:
        return None
    hosts = _read(environ, _HOSTS, expand_hosts)
    counts = _read(environ, _COUNTS, expand_counts)
    _check_counts(environ, hosts, counts, num_tasks)
    places = places_of_ranks(counts, _ranks_in_turn(environ))
    rank = _number(environ, "SLURM_PROCID")
    _check_place(environ, rank, places)
    port = first_port(_number(environ, "SLURM_JOB_ID", "SLURM_JOBID"), _step(environ))
    addresses = tuple(f"{hosts[node]}:{port + local}" for node, local in places)
    return Cluster(addresses={WORKER: addresses}, role=WORKER, index=rank)


def first_port(job: int, step: int) -> int:
    """The port of a node's first task; its others have the next ones."""
    block = (job + _BLOCKS_BETWEEN_STEPS * step) % _NUM_BLOCKS
    return FIRST_PORT + TASKS_OF_A_NODE * block


def places_of_ranks(counts: Sequence[int], in_turn: int | None) -> list[tuple[int, int]]:
    """Node and number on the node of every rank.

    Args:
      counts: tasks of each node.
      in_turn: how many ranks a node takes before it is the next one's turn, over and over until all are full;
        None for as many as it has tasks.
    """
    in_turn = in_turn or max(counts)
    dealt = (
        (node, local)
        for first in range(0, max(counts), in_turn)
        for node, count in enumerate(counts)
        for local in range(first, min(first + in_turn, count))
    )
    return list(dealt)


def _in_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ or not _given(environ, "SLURM_STEP_ID", "SLURM_STEPID"):
        return False
    return _step(environ) < _FIRST_SPECIAL_STEP


def _step(environ: Mapping[str, str]) -> int:
    return _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")


def _ranks_in_turn(environ: Mapping[str, str]) -> int | None:
    """How the step's ranks are dealt to its nodes, as for `places_of_ranks`."""
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    # What follows is about sockets and cores within a node.
    over_nodes = re.split("[:,]", distribution.lower())[0]
    if over_nodes in ("block", "*", ""):
        return None
    if over_nodes == "cyclic":
        return 1
    if over_nodes == "plane":
        return max(1, _number(environ, "SLURM_DIST_PLANESIZE"))
    raise UserError(
        f"SLURM_DISTRIBUTION={distribution}: which node has which rank is known for block, cyclic and plane; give "
        "srun --distribution=block, or set TF_CONFIG"
    )


def _check_counts(environ: Mapping[str, str], hosts: Sequence[str], counts: Sequence[int], num_tasks: int) -> None:
    """Raises UserError if hosts, tasks of each and tasks of all don't agree, or a node's are too many."""
    shown = _shown(environ, *_COUNTS)
    if len(counts) != len(hosts):
        raise UserError(
            f"{shown}: {len(counts)} counts, but {len(hosts)} nodes in {_shown(environ, *_HOSTS)}; {_WAY_OUT}"
        )
    if sum(counts) != num_tasks:
        raise UserError(f"{shown}: {sum(counts)} tasks in all, but {_shown(environ, *_NUM_TASKS)}; {_WAY_OUT}")
    if max(counts) > TASKS_OF_A_NODE:
        raise UserError(
            f"{shown}: a node has {max(counts)} tasks, and ports for {TASKS_OF_A_NODE}; start fewer on a node, "
            "each with several towers, or set TF_CONFIG"
        )


def _check_place(environ: Mapping[str, str], rank: int, places: Sequence[tuple[int, int]]) -> None:
    """Raises UserError if this task is not where its rank should be: rather that than a ring that never meets."""
    if rank >= len(places):
        raise UserError(f"SLURM_PROCID={rank}: the step has ranks 0 to {len(places) - 1}; {_WAY_OUT}")
    for name, expected in zip(("SLURM_NODEID", "SLURM_LOCALID"), places[rank], strict=True):
        if name in environ and _number(environ, name) != expected:
            raise UserError(
                f"{name}={environ[name]}: rank {rank} should have {expected} there by "
                f"SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION', 'block')}; {_WAY_OUT}"
            )


def _given(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of the variables that is set; Slurm's versions have several names for one thing."""
    return next((name for name in names if environ.get(name)), None)


def _shown(environ: Mapping[str, str], *names: str) -> str:
    """The first of the variables that is set, as NAME=value."""
    name = _given(environ, *names)
    return f"{name}={environ[name]}"


def _read(environ: Mapping[str, str], names: Sequence[str], parse: Callable):
    """What `parse` makes of the first of the variables that is set."""
    name = _given(environ, *names)
    if name is None:
        raise UserError(f"{names[0]} is not set, though SLURM_STEP_ID says that srun runs this; {_WAY_OUT}")
    try:
        return parse(environ[name])
    except ValueError as error:
        raise UserError(f"{_shown(environ, name)}: {error}; {_WAY_OUT}") from error


def _number(environ: Mapping[str, str], *names: str) -> int:
    return _read(environ, names, _whole_number)


def _whole_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise ValueError("a whole number belongs there")
    return int(text)
