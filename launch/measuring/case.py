"""One row of the benchmark's table: the work and the command that measures it."""

import dataclasses
import difflib
import pathlib
import sys
from collections.abc import Collection, Mapping

from absl import flags

from launch.measuring.forwarded_flags import forwarded_flags
from launch.measuring.imitated_cpu import NO_ISA, imitation, why_not_imitated
from launch.supervision.own_program import own_program
from models.networks.registry import network_names
from models.networks.transformer import TRANSFORMERS
from strategies.cluster import CHIEF, SERVER, WORKER
from strategies.engines import ENGINES, TENSORFLOW
from towers.errors import UserError
from towers.precision import PRECISIONS

FLAGS = flags.FLAGS
FLOAT32, BFLOAT16 = "float32", "bfloat16"
NO_LINK = "none"
# The rate of each kind of link between two processes, in million bits per second in each direction.
MEGABITS = {"1gbit": 1000, "100mbit": 100}
# The networks that each of the peers' programs has.
_PEER_NETWORKS = {
    "keras_step.py": ("resnet20",),
    "torch_step.py": ("resnet20",),
    "ps_step.py": ("tiny", "resnet20"),
}
# Peers whose processes find each other by TF_CONFIG, in which `peer_on_hosts.py` can replace addresses.
_PEERS_BY_TF_CONFIG = ("keras_step.py", "ps_step.py")
# For each strategy: the number of processes by role, from `count`; {} is one process without a cluster.
_PROCESSES = {
    "towers": lambda count: {},
    "mirrored": lambda count: {},
    "pipeline": lambda count: {},
    "slices": lambda count: {},
    "ring": lambda count: {WORKER: count},
    "ps": lambda count: {CHIEF: 1, WORKER: count, SERVER: 1},
}


# Flags for strategies whose only tower has `count` devices, each with one thread.
_OF_ONE_TOWER = {
    "pipeline": lambda count: (f"--stages={count}", "--threads_per_tower=1"),
    "slices": lambda count: (f"--slices={count}", "--threads_per_tower=1"),
}


def measured_networks() -> tuple[str, ...]:
    """Names of the networks that can be measured: those for images, and the transformers."""
    return (*network_names(), *TRANSFORMERS)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work that a row measures.

    Attributes:
      strategy: this project's strategy, or the peer's name.
      count: number of towers, replicas, processes or workers.
      network: the network's name.
      batch: examples in a global batch; for asynchronous workers, examples in one update.
      precision: precision in which layers compute.
      engine: 'tensorflow' or 'own' for a ring or parameter servers; '' for other strategies.
      link: the link of each process to the others, a key of MEGABITS; 'none': this machine's loopback.
      isa: instructions of the imitated CPU, one of `ISAS`; 'none': this CPU.
      steps: number of measured steps in each round.
      flags: further flags of this project's rows, from the benchmark's command line: '--recompute=full --notf32'.
      allowed_speedup: how many times the rate of one device a pipeline can have: devices * (1 - bubble), for
        stages that take equally long; 0 for other work.
    """

    strategy: str
    count: int
    network: str
    batch: int
    precision: str = FLOAT32
    engine: str = ""
    link: str = NO_LINK
    isa: str = NO_ISA
    steps: int = 0
    flags: str = ""
    allowed_speedup: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the benchmark's table.

    Attributes:
      name: the row's name.
      work: the work that it measures.
      command: a command whose last line of output is a JSON object with the measurement.
      processes: number of processes of each role that run the command, each with its TF_CONFIG; the measurement is
        the first process's. {}: one process without TF_CONFIG.
      variables: added to the environment of these processes.
      is_peer: whether the command is another project's program.
      num_processes: number of processes that a peer's program starts and that exchange data.
      left_out: the reason why this row can't be measured; '' if it can.
    """

    name: str
    work: Work
    command: tuple[str, ...]
    processes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_peer: bool = False
    num_processes: int = 1
    left_out: str = ""


def work_of_flags(strategy: str, count: int, precision: str = FLOAT32, engine: str = "") -> Work:
    """Work on the network, batch and steps that the flags choose."""
    return Work(
        strategy, count, FLAGS.network, FLAGS.measured_batch, precision, engine, steps=FLAGS.measured_steps
    )


def batch_of_flags(default: int) -> int:
    """The value of --measured_batch; `default` if the flag is not given."""
    return FLAGS.measured_batch if FLAGS["measured_batch"].present else default


def own_case(name: str, work: Work, *more: str, measure: str = "step", **processes: int) -> Case:
    """A row that measures this project.

    Args:
      name: the row's name.
      work: the work to measure.
      *more: further flags.
      measure: the kind of measurement, a key of MEASUREMENTS.
      **processes: number of processes of each role; default: what the strategy needs for `work.count`.
    """
    given = forwarded_flags()
    command, variables = own_program(
        "launch.benchmark",
        *given,
        *(f"--measure={measure}", f"--strategy={work.strategy}"),
        *(f"--network={work.network}", f"--measured_batch={work.batch}", f"--precision={work.precision}"),
        *(f"--measured_steps={FLAGS.measured_steps}", f"--slow_seconds={FLAGS.slow_seconds}"),
        *devices_of(work),
        *([f"--engine={work.engine}"] if work.engine else []),
        *more,
    )
    processes = processes or _PROCESSES[work.strategy](work.count)
    name, work = linked(name, work) if processes else (name, work)
    work = dataclasses.replace(work, isa=FLAGS.isa, flags=" ".join(given))
    variables = {**variables, **imitation(FLAGS.isa, is_peer=False)}
    return Case(
        name, work, command, processes, variables=variables, left_out=why_not_imitated(work.isa, work.precision)
    )


def linked(name: str, work: Work) -> tuple[str, Work]:
    """The name and the work of a row of several processes, with the link of --link added to both."""
    if FLAGS.link == NO_LINK:
        return name, work
    return f"{name}, {FLAGS.link}", dataclasses.replace(work, link=FLAGS.link)


def devices_of(work: Work) -> tuple[str, ...]:
    """Flags for the devices: `count` in one process, or one tower of one thread in each of several."""
    if work.strategy in _OF_ONE_TOWER:
        return _OF_ONE_TOWER[work.strategy](work.count)
    if not _PROCESSES[work.strategy](1):
        return (f"--num_towers={work.count}",)
    return ("--num_towers=1", "--threads_per_tower=1")


def named_case(row: str) -> Case:
    """The row that a value of --row describes: STRATEGY[/ENGINE],COUNT[,NETWORK[,BATCH[,PRECISION]]].

    Raises:
      UserError: the value does not have this form.
    """
    words = row.split(",")
    strategy, _, engine = words[0].partition("/")
    has_engine = strategy in _PROCESSES and bool(_PROCESSES[strategy](1))
    is_known = strategy in _PROCESSES and (not engine or (has_engine and engine in ENGINES))
    if not 2 <= len(words) <= 5 or not is_known or not all(map(_is_count, [words[1], *words[3:4]])):
        known = ", ".join(_PROCESSES)
        raise UserError(
            f"--row={row}: give STRATEGY[/ENGINE],COUNT[,NETWORK[,BATCH[,PRECISION]]] with a strategy of {known}, "
            "an engine for ring or ps, and numbers above 0, e.g. towers,2,resnet20,256,bfloat16 or ring/own,2"
        )
    _, count, network, batch, precision = [*words, *("", "", "", "", "")[len(words) :]]
    work = Work(
        strategy,
        int(count),
        _one_of(row, "network", network or FLAGS.network, measured_networks()),
        int(batch or FLAGS.measured_batch),
        _one_of(row, "precision", precision or FLOAT32, PRECISIONS),
        engine or (TENSORFLOW if has_engine else ""),
        steps=FLAGS.measured_steps,
    )
    name = f"{words[0]} {count}, {work.network}, {work.batch}, {work.precision}"
    return own_case(name, work, measure="servers" if strategy == "ps" else "step")


def _one_of(row: str, what: str, value: str, known: Collection[str]) -> str:
    """The value; raises UserError if it is unknown."""
    if value not in known:
        nearest = difflib.get_close_matches(value, known, n=1, cutoff=0.0)[0]
        raise UserError(
            f"--row={row}: {what} {value!r} must be one of {', '.join(known)}; did you mean {nearest!r}?"
        )
    return value


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def peer_case(
    name: str, work: Work, program: str, *more: str, python: str = sys.executable, num_processes: int = 1
) -> Case:
    """A row that measures the same work with a peer's program, from the folder --peers.

    Args:
      name: the row's name.
      work: the work to measure.
      program: the program's file name.
      *more: further arguments.
      python: the interpreter.
      num_processes: number of processes that the program starts and that exchange data.

    Raises:
      UserError: the program is not in that folder.
    """
    path = pathlib.Path(FLAGS.peers) / program
    if not path.exists():
        raise UserError(f"--peers={FLAGS.peers} does not contain {program}; give the folder of the peer programs")
    command = (python, str(path), f"--batch={work.batch}", f"--steps={FLAGS.measured_steps}", *more)
    name, work = linked(name, work) if num_processes > 1 else (name, work)
    return case_of_peer(name, work, command, num_processes=num_processes, left_out=why_left_out(work, program))


def case_of_peer(name: str, work: Work, command: tuple[str, ...], **others) -> Case:
    """A row that measures the same work with another project's program; `others` are fields of `Case`."""
    work, variables = dataclasses.replace(work, isa=FLAGS.isa), imitation(FLAGS.isa, is_peer=True)
    return Case(name, work, command, variables=variables, is_peer=True, **others)


def why_left_out(work: Work, program: str) -> str:
    """The reason why a peer's program can't do this work; '' if it can."""
    if work.network not in _PEER_NETWORKS[program]:
        return f"{program} has no {work.network}, only {' and '.join(_PEER_NETWORKS[program])}"
    if work.link != NO_LINK and program not in _PEERS_BY_TF_CONFIG:
        return f"{program} connects its processes through 127.0.0.1 and takes no other addresses"
    return ""
