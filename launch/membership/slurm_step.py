"""The cluster that one `srun` starts. Without servers each task of the Slurm step is a worker with Slurm's rank.

With TOWERS_SERVERS=2, which the script of launch.slurm sets, rank 0 is the chief, the last tasks of two nodes are
parameter servers, and the others are workers:

    node 0:  chief:0   worker:0   ps:0
    node 1:  worker:1  worker:2   ps:1

Each task computes the cluster from its own environment. All tasks get the same ports without communication:

    port = 20000 + 64 * ((job + 20 * step) mod 199) + index of the task on its node

These are ports 20000 to 32735, below Linux's range for outgoing connections (from 32768). The first steps of 199
consecutive jobs share no port, and neither do the first ten steps of 19 consecutive jobs.
"""

import collections
import re
from collections.abc import Callable, Mapping, Sequence

from launch.membership.hostlist import expand_counts, expand_hosts
from strategies.cluster import CHIEF, SERVER, WORKER, Cluster
from towers.errors import UserError

SERVERS_VARIABLE = "TOWERS_SERVERS"
FIRST_PORT = 20000
TASKS_OF_A_NODE = 64
_NUM_BLOCKS = 199
_BLOCKS_BETWEEN_STEPS = 20

# Steps that no srun started (a batch script, the shell of salloc) have ids at the top of 32 bits, counted down.
_FIRST_SPECIAL_STEP = 0xFFFFFF00

_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_FIX = "start it with srun and leave Slurm's variables unchanged, or set TF_CONFIG, which overrides them"


def cluster_from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster of this process's Slurm step; None outside of a step, or in a step of one task.

    A batch script has its job's variables, including the number of tasks, but is not a task itself.

    Raises:
      UserError: Slurm's variables are missing, malformed or inconsistent.
    """
    if not _in_step(environ):
        return None
    num_tasks = _number(environ, *_NUM_TASKS)
    if num_tasks < 2:
        return None
    hosts = _read(environ, _HOSTS, expand_hosts)
    counts = _read(environ, _COUNTS, expand_counts)
    _check_counts(environ, hosts, counts, num_tasks)
    positions = positions_of_ranks(counts, _ranks_per_turn(environ))
    rank = _number(environ, "SLURM_PROCID")
    _check_position(environ, rank, positions)
    port = first_port(_number(environ, "SLURM_JOB_ID", "SLURM_JOBID"), _step(environ))
    ranks = ranks_by_role(positions, _num_servers(environ, num_tasks))
    addresses = {
        role: tuple(f"{hosts[positions[of][0]]}:{port + positions[of][1]}" for of in of_role)
        for role, of_role in ranks.items()
    }
    role = next(role for role, of_role in ranks.items() if rank in of_role)
    return Cluster(addresses=addresses, role=role, index=ranks[role].index(rank))


def first_port(job: int, step: int) -> int:
    """The port of a node's first task; the node's other tasks use the following ports."""
    block = (job + _BLOCKS_BETWEEN_STEPS * step) % _NUM_BLOCKS
    return FIRST_PORT + TASKS_OF_A_NODE * block


def positions_of_ranks(counts: Sequence[int], ranks_per_turn: int | None) -> list[tuple[int, int]]:
    """(index of the node, index of the task on the node) of each rank.

    Args:
      counts: number of tasks of each node.
      ranks_per_turn: number of consecutive ranks that a node gets before the next node's turn; turns repeat until
        all nodes are full. None: all ranks of a node are consecutive.
    """
    ranks_per_turn = ranks_per_turn or max(counts)
    positions = (
        (node, local)
        for first in range(0, max(counts), ranks_per_turn)
        for node, count in enumerate(counts)
        for local in range(first, min(first + ranks_per_turn, count))
    )
    return list(positions)


def ranks_by_role(positions: Sequence[tuple[int, int]], num_servers: int) -> Mapping[str, list[int]]:
    """The ranks of each role, by index; only workers if there are no servers.

    Args:
      positions: result of `positions_of_ranks`.
      num_servers: number of parameter servers.
    """
    ranks = range(len(positions))
    if not num_servers:
        return {WORKER: list(ranks)}
    tasks = collections.Counter(node for node, _ in positions)

    def turn(rank: int) -> tuple[int, int]:
        """(number of its node's tasks from this one on, node): the order in which tasks become servers.

        Servers share a node only if they must.
        """
        node, local = positions[rank]
        return tasks[node] - local, node

    servers = sorted(ranks[1:], key=turn)[:num_servers]
    return {CHIEF: [0], WORKER: [rank for rank in ranks[1:] if rank not in servers], SERVER: servers}


def _num_servers(environ: Mapping[str, str], num_tasks: int) -> int:
    found = _number(environ, SERVERS_VARIABLE) if environ.get(SERVERS_VARIABLE) else 0
    if found and num_tasks < found + 2:
        raise UserError(
            f"{SERVERS_VARIABLE}={found}: the step has {num_tasks} tasks, but a chief, {found} servers and a "
            f"worker need {found + 2}; start them with srun --ntasks={found + 2}, or set TF_CONFIG"
        )
    return found


def _in_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ or not _given(environ, "SLURM_STEP_ID", "SLURM_STEPID"):
        return False
    return _step(environ) < _FIRST_SPECIAL_STEP


def _step(environ: Mapping[str, str]) -> int:
    return _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")


def _ranks_per_turn(environ: Mapping[str, str]) -> int | None:
    """How the step's ranks are distributed over its nodes, as for `positions_of_ranks`."""
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    # The fields after it are about sockets and cores within a node.
    over_nodes = re.split("[:,]", distribution.lower())[0]
    if over_nodes in ("block", "*", ""):
        return None
    if over_nodes == "cyclic":
        return 1
    if over_nodes == "plane":
        return max(1, _number(environ, "SLURM_DIST_PLANESIZE"))
    raise UserError(
        f"SLURM_DISTRIBUTION={distribution}: the nodes of the ranks are known only for block, cyclic and plane; "
        "use srun --distribution=block, or set TF_CONFIG"
    )


def _check_counts(environ: Mapping[str, str], hosts: Sequence[str], counts: Sequence[int], num_tasks: int) -> None:
    """Raises UserError if hosts, counts and number of tasks are inconsistent, or a node has too many tasks."""
    shown = _shown(environ, *_COUNTS)
    if len(counts) != len(hosts):
        raise UserError(
            f"{shown}: {len(counts)} counts, but {len(hosts)} nodes in {_shown(environ, *_HOSTS)}; {_FIX}"
        )
    if sum(counts) != num_tasks:
        raise UserError(f"{shown}: {sum(counts)} tasks in all, but {_shown(environ, *_NUM_TASKS)}; {_FIX}")
    if max(counts) > TASKS_OF_A_NODE:
        raise UserError(
            f"{shown}: a node has {max(counts)} tasks, but a step has ports for {TASKS_OF_A_NODE} on a node; "
            "start fewer tasks per node, each with several towers, or set TF_CONFIG"
        )


def _check_position(environ: Mapping[str, str], rank: int, positions: Sequence[tuple[int, int]]) -> None:
    """Raises UserError if Slurm gives this rank another position: workers would wait at wrong addresses."""
    if rank >= len(positions):
        raise UserError(f"SLURM_PROCID={rank}: the step has ranks 0 to {len(positions) - 1}; {_FIX}")
    for name, expected in zip(("SLURM_NODEID", "SLURM_LOCALID"), positions[rank], strict=True):
        if name in environ and _number(environ, name) != expected:
            raise UserError(
                f"{name}={environ[name]}: rank {rank} should have {expected} with "
                f"SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION', 'block')}; {_FIX}"
            )


def _given(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of these variables that is set; the names differ between versions of Slurm."""
    return next((name for name in names if environ.get(name)), None)


def _shown(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set, as NAME=value."""
    name = _given(environ, *names)
    return f"{name}={environ[name]}"


def _read(environ: Mapping[str, str], names: Sequence[str], parse: Callable):
    """The first of these variables that is set, parsed."""
    name = _given(environ, *names)
    if name is None:
        raise UserError(
            f"{names[0]} is not set, although SLURM_STEP_ID says that srun started this process; {_FIX}"
        )
    try:
        return parse(environ[name])
    except ValueError as error:
        raise UserError(f"{_shown(environ, name)}: {error}; {_FIX}") from error


def _number(environ: Mapping[str, str], *names: str) -> int:
    return _read(environ, names, _whole_number)


def _whole_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise ValueError("a whole number is required")
    return int(text)
