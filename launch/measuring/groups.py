"""The rows of each --group: this project's, and the peers' on the same work."""

import dataclasses
from collections.abc import Callable, Mapping

from absl import flags

from launch.measuring.case import BFLOAT16, FLOAT32, Case, Work, named_case, own_case, peer_case, work_of_flags
from launch.measuring.cifar_fast_cases import cifar_fast_cases
from launch.measuring.gpu_cases import check_gpus, gpu_cases
from launch.measuring.larger_models import (
    larger_cases,
    pipeline_cases,
    recompute_cases,
    ring_zero_cases,
    sharded_cases,
)
from launch.measuring.short_step_cases import short_step_cases
from strategies.cluster import CHIEF, SERVER, WORKER
from strategies.engines import OWN, TENSORFLOW
from towers.errors import UserError

FLAGS = flags.FLAGS
_BOTH = (TENSORFLOW, OWN)
# Groups for which --torch needs no --peers: their PyTorch programs are in launch/measuring/peers/.
_WITH_OWN_PEERS = (cifar_fast_cases, gpu_cases, short_step_cases)
# Delay of each batch that the slow worker reads: 30 ms per step in sync. An asynchronous worker also reads the
# batches of the two other workers: 90 ms per step.
_SLOW_SECONDS = 0.03


def cases() -> list[Case]:
    """The rows that the flags select: those of --row, or of --group.

    Raises:
      UserError: a flag is wrong, a row is given twice, or a group needs a GPU that is not there.
    """
    if not FLAGS.row and GROUPS[FLAGS.group] is gpu_cases:
        check_gpus()
    rows = [named_case(row) for row in FLAGS.row] if FLAGS.row else GROUPS[FLAGS.group]()
    names = [row.name for row in rows]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(
            f"--row: the row {twice[0]!r} is given twice; give each once, and more --rounds to repeat it"
        )
    _check_peers()
    return rows


def _check_peers() -> None:
    """Raises UserError if --peers or --torch is given for rows without peers, or --torch lacks --peers."""
    named = "--peers" if FLAGS.peers else "--torch" if FLAGS.torch else ""
    if named and FLAGS.row:
        raise UserError(f"{named}: rows of --row have no peers; use a --group, or omit {named}")
    if FLAGS.torch and not FLAGS.peers and GROUPS[FLAGS.group] not in _WITH_OWN_PEERS:
        raise UserError("--torch needs --peers, the folder that has torch_step.py")


def towers_cases() -> list[Case]:
    """Towers in one process, and peers in one process."""
    rows = [
        own_case("towers 2", work_of_flags("towers", 2)),
        own_case("towers 2, Trainer's loop", work_of_flags("towers", 2), measure="trainer"),
        one_tower(),
        own_case("towers 8", work_of_flags("towers", 8)),
        own_case("towers 2, bfloat16", work_of_flags("towers", 2, BFLOAT16)),
        one_tower(BFLOAT16),
    ]
    if FLAGS.peers:
        rows += [
            peer_case(f"keras {mode}", work_of_flags(f"keras {mode}", count), "keras_step.py", "--mode", mode)
            for mode, count in (("fit", 1), ("mirrored", 2))
        ]
    return rows + torch_cases(1)


def kinds_of_cpu_cases() -> list[Case]:
    """Two towers in both precisions beside PyTorch: few rows, for many rounds; for the table of CPUs."""
    rows = [
        own_case(f"towers 2{_said(precision)}", work_of_flags("towers", 2, precision))
        for precision in (FLOAT32, BFLOAT16)
    ]
    left_out = [row.work.precision for row in rows if row.left_out]
    return rows + [row for row in torch_cases(1) if row.work.precision not in left_out]


def one_tower(precision: str = FLOAT32) -> Case:
    """One tower on all threads, the reference for efficiency."""
    return own_case(f"towers 1{_said(precision)}", work_of_flags("towers", 1, precision))


def _said(precision: str) -> str:
    """The suffix for a row's name that gives the precision."""
    return "" if precision == FLOAT32 else f", {precision}"


def ring_cases() -> list[Case]:
    """Rings of two processes of one thread each, on both engines."""
    rows = [*rings(2), *rings(2, BFLOAT16), one_tower(), one_tower(BFLOAT16)]
    if FLAGS.peers:
        rows += [keras_ring(2), keras_ring(2, BFLOAT16)]
    return rows + torch_cases(2)


def engines_ring_cases() -> list[Case]:
    """For each number of --processes: a ring on each engine, and the peer's."""
    return [row for count in processes() for row in [*rings(count), *([keras_ring(count)] if FLAGS.peers else [])]]


def engines_servers_cases() -> list[Case]:
    """For each number of --processes: that many workers and one server on each engine, and the peer's."""
    rows = []
    for count in processes():
        rows += [
            own_case(f"ps {count}, {engine}", work_of_flags("ps", count, engine=engine), measure="servers")
            for engine in _BOTH
        ]
        rows += [keras_servers(f"keras ps {count}", count)] if FLAGS.peers else []
    return rows


def processes() -> list[int]:
    """The numbers of --processes.

    Raises:
      UserError: one of them is not a whole number of at least 2.
    """
    given = f"--processes={','.join(FLAGS.processes)}"
    if len(set(FLAGS.processes)) < len(FLAGS.processes):
        raise UserError(f"{given}: a number is given twice; give each once, and more --rounds to repeat it")
    if not FLAGS.processes or not all(word.isdecimal() and int(word) > 1 for word in FLAGS.processes):
        raise UserError(f"{given}: must be whole numbers of at least 2; give for example 2,4")
    return [int(word) for word in FLAGS.processes]


def rings(count: int, precision: str = FLOAT32) -> list[Case]:
    """A ring on each engine."""
    return [
        own_case(f"ring {count}, {engine}{_said(precision)}", work_of_flags("ring", count, precision, engine))
        for engine in _BOTH
    ]


def keras_ring(count: int, precision: str = FLOAT32) -> Case:
    """The peer's ring, on MultiWorkerMirroredStrategy."""
    more = ("--mode", "ring", "--workers", str(count), "--dtype", precision)
    work = work_of_flags("keras ring", count, precision)
    return peer_case(f"keras ring {count}{_said(precision)}", work, "keras_step.py", *more, num_processes=count)


def keras_servers(name: str, workers: int) -> Case:
    """The peer's asynchronous servers, on ParameterServerStrategy: with one server and a chief."""
    more = ("--model", FLAGS.network, "--workers", str(workers))
    work = work_of_flags("keras ps", workers)
    return peer_case(name, work, "ps_step.py", *more, num_processes=workers + 2)


def torch_cases(num_processes: int) -> list[Case]:
    """PyTorch in both precisions, if --torch and --peers are given; several processes use gloo."""
    if not (FLAGS.peers and FLAGS.torch):
        return []
    return [
        peer_case(
            f"torch, {num_processes} processes{_said(precision)}",
            work_of_flags("torch", num_processes, precision),
            *("torch_step.py", "--procs", str(num_processes), "--dtype", precision),
            python=FLAGS.torch,
            num_processes=num_processes,
        )
        for precision in (FLOAT32, BFLOAT16)
    ]


def servers_cases() -> list[Case]:
    """Asynchronous parameter servers with workers of one thread each; without an engine in the name, our own."""
    tensorflow = own_case(
        "ps, tensorflow, 2 workers, 1 server", work_of_flags("ps", 2, engine=TENSORFLOW), measure="servers"
    )
    rows = [tensorflow, servers_case(2, 1), servers_case(2, 1, "--prefetch_parameters")]
    if FLAGS.peers:
        rows.append(keras_servers("keras ps, 2 workers, 1 server", 2))
    return rows + [servers_case(workers, servers) for workers, servers in ((1, 1), (4, 1), (1, 2), (2, 2), (4, 2))]


def servers_case(workers: int, servers: int, *more: str) -> Case:
    name = f"ps, {workers} workers, {servers} servers" + (", prefetching" if more else "")
    work = work_of_flags("ps", workers, engine=OWN)
    return own_case(name, work, *more, measure="servers", **{CHIEF: 1, WORKER: workers, SERVER: servers})


def slow_worker_cases() -> list[Case]:
    """Parameter servers under each kind of staleness, without and with a worker whose input is slow."""
    kinds = {
        "async": ("--staleness=async",),
        "bound 8": ("--staleness=8",),
        "bound 64": ("--staleness=64",),
        "sync": ("--staleness=sync",),
        "sync, 1 backup": ("--staleness=sync", "--backup_workers=1"),
    }
    rows = []
    for kind, flags_of_kind in kinds.items():
        for slow in (0.0, _SLOW_SECONDS):
            name = f"ps, {kind}, {'one slow' if slow else 'none slow'}"
            more = (*flags_of_kind, f"--slow_seconds={slow}")
            rows.append(own_case(name, work_of_flags("ps", 3, engine=OWN), *more, measure="servers"))
    return rows


def input_cases() -> list[Case]:
    """The input stream alone, and the training that reads it."""
    batch = FLAGS.measured_batch
    stream = Work("input", 1, "crops and flips of 50,000 images", batch, isa=FLAGS.isa, steps=FLAGS.measured_steps)
    return [
        dataclasses.replace(own_case("input alone", work_of_flags("towers", 2), measure="input"), work=stream),
        own_case("towers 2", work_of_flags("towers", 2)),
        own_case("towers 2, bfloat16", work_of_flags("towers", 2, BFLOAT16)),
    ]


def kernels_cases() -> list[Case]:
    """Our own kernels beside TensorFlow's, each on one thread."""
    work = {precision: work_of_flags("towers", 1, precision) for precision in (FLOAT32, BFLOAT16)}
    return [
        dataclasses.replace(
            own_case(f"kernels, {precision}", one, "--threads_per_tower=1", measure="kernels"),
            work=Work("kernels", 1, "layers", 64, precision, isa=FLAGS.isa, steps=FLAGS.measured_steps),
        )
        for precision, one in work.items()
    ]


def batch_stats_cases() -> list[Case]:
    """Two towers with the statistics of their own parts and of the whole batch, and one tower."""
    return [
        own_case(f"towers {count}, {policy}", work_of_flags("towers", count), f"--batch_stats={policy}")
        for count, policy in ((2, "average"), (2, "synced"), (1, "synced"))
    ]


GROUPS: Mapping[str, Callable[[], list[Case]]] = {
    "towers": towers_cases,
    "ring": ring_cases,
    "servers": servers_cases,
    "engines_ring": engines_ring_cases,
    "engines_servers": engines_servers_cases,
    "slow_worker": slow_worker_cases,
    "input": input_cases,
    "kernels": kernels_cases,
    "kinds_of_cpu": kinds_of_cpu_cases,
    "cifar_fast": cifar_fast_cases,
    "short_steps": short_step_cases,
    "batch_stats": batch_stats_cases,
    "pipeline": pipeline_cases,
    "sharded": sharded_cases,
    "recompute": recompute_cases,
    "ring_zero": ring_zero_cases,
    "larger_than_a_device": larger_cases,
    "gpu": gpu_cases,
}
