"""The rows of each --group: this project's, and the peers' on the same work."""

import dataclasses
from collections.abc import Callable, Mapping

from absl import flags

from launch.measuring.case import BFLOAT16, Case, Work, named_case, own_case, peer_case, work_of_flags
from strategies.cluster import CHIEF, SERVER, WORKER
from strategies.engines import OWN, TENSORFLOW

FLAGS = flags.FLAGS
_BOTH = (TENSORFLOW, OWN)
# Delay of each batch that the slow worker reads: 30 ms per step in sync. An asynchronous worker also reads the
# batches of the two other workers: 90 ms per step.
_SLOW_SECONDS = 0.03


def cases() -> list[Case]:
    """The rows that the flags select: those of --row, or of --group."""
    return [named_case(row) for row in FLAGS.row] if FLAGS.row else GROUPS[FLAGS.group]()


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


def one_tower(precision: str = "float32") -> Case:
    """One tower on all threads, the reference for efficiency."""
    written = "" if precision == "float32" else f", {precision}"
    return own_case(f"towers 1{written}", work_of_flags("towers", 1, precision))


def ring_cases() -> list[Case]:
    """Rings of two processes of one thread each, on both engines."""
    rows = [
        *(own_case(f"ring 2, {engine}", work_of_flags("ring", 2, engine=engine)) for engine in _BOTH),
        *(own_case(f"ring 2, {engine}, bfloat16", work_of_flags("ring", 2, BFLOAT16, engine)) for engine in _BOTH),
        one_tower(),
        one_tower(BFLOAT16),
    ]
    if FLAGS.peers:
        rows += peer_cases("keras ring", work_of_flags("keras ring", 2), "keras_step.py", "--mode", "ring")
    return rows + torch_cases(2)


def torch_cases(num_processes: int) -> list[Case]:
    """PyTorch in both precisions, if --torch and --peers are given; several processes use gloo."""
    if not (FLAGS.peers and FLAGS.torch):
        return []
    name, work = f"torch, {num_processes} processes", work_of_flags("torch", num_processes)
    return peer_cases(name, work, "torch_step.py", "--procs", str(num_processes), python=FLAGS.torch)


def peer_cases(name: str, work: Work, program: str, *more: str, **python: str) -> list[Case]:
    """A peer's program in both precisions."""
    half = dataclasses.replace(work, precision=BFLOAT16)
    return [
        peer_case(name, work, program, *more, **python),
        peer_case(f"{name}, bfloat16", half, program, *more, "--dtype", BFLOAT16, **python),
    ]


def servers_cases() -> list[Case]:
    """Asynchronous parameter servers with workers of one thread each; without an engine in the name, our own."""
    tensorflow = own_case(
        "ps, tensorflow, 2 workers, 1 server", work_of_flags("ps", 2, engine=TENSORFLOW), measure="servers"
    )
    rows = [tensorflow, servers_case(2, 1), servers_case(2, 1, "--prefetch_parameters")]
    if FLAGS.peers:
        rows.append(
            peer_case(
                "keras ps, 2 workers, 1 server",
                work_of_flags("keras ps", 2),
                "ps_step.py",
                "--model",
                FLAGS.network,
            )
        )
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
    stream = Work("input", 1, "crops and flips of 50,000 images", batch)
    return [
        dataclasses.replace(own_case("input alone", work_of_flags("towers", 2), measure="input"), work=stream),
        own_case("towers 2", work_of_flags("towers", 2)),
        own_case("towers 2, bfloat16", work_of_flags("towers", 2, BFLOAT16)),
    ]


GROUPS: Mapping[str, Callable[[], list[Case]]] = {
    "towers": towers_cases,
    "ring": ring_cases,
    "servers": servers_cases,
    "slow_worker": slow_worker_cases,
    "input": input_cases,
}
