"""One line of the benchmark's table: a piece of work and the command that measures it."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping

from absl import flags

from strategies.cluster import CHIEF, SERVER, WORKER
from towers.errors import UserError

FLAGS = flags.FLAGS
FLOAT32, BFLOAT16 = "float32", "bfloat16"
# What a strategy's `count` counts, and the processes it takes.
_PROCESSES = {
    "towers": lambda count: {},
    "mirrored": lambda count: {},
    "ring": lambda count: {WORKER: count},
    "ps": lambda count: {CHIEF: 1, WORKER: count, SERVER: 1},
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a line measures.

    Attributes:
      strategy: of ours; or the peer's name.
      count: towers, replicas, processes or workers.
      network: by name.
      batch: examples in a global batch, or of one update where workers don't wait.
      precision: what layers compute in.
    """

    strategy: str
    count: int
    network: str
    batch: int
    precision: str = FLOAT32


@dataclasses.dataclass(frozen=True)
class Case:
    """Attributes:
    name: of the line.
    work: what is done.
    command: prints a JSON object in its last line.
    processes: how many of each role run the command, each told by TF_CONFIG who the others are; the first one's
      object is taken. {} is one process that is told of nobody.
    is_peer: somebody else's program.
    """

    name: str
    work: Work
    command: tuple[str, ...]
    processes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_peer: bool = False


def work_of_flags(strategy: str, count: int, precision: str = FLOAT32) -> Work:
    """With the network and the batch that the flags say."""
    return Work(strategy, count, FLAGS.network, FLAGS.measured_batch, precision)


def own_case(name: str, work: Work, *more: str, measure: str = "step", **processes: int) -> Case:
    """A measurement of this project in fresh processes.

    Args:
      name: of the line.
      work: what is done.
      *more: flags.
      measure: which kind of measurement.
      **processes: of each role; nothing for what the strategy takes.
    """
    command = (
        *(sys.executable, "-m", "launch.benchmark", f"--measure={measure}", f"--strategy={work.strategy}"),
        *(f"--network={work.network}", f"--measured_batch={work.batch}", f"--precision={work.precision}"),
        f"--measured_steps={FLAGS.measured_steps}",
        *devices_of(work),
        *more,
    )
    return Case(name, work, command, processes or _PROCESSES[work.strategy](work.count))


def devices_of(work: Work) -> tuple[str, ...]:
    """Towers in one process; of several processes each has one tower of one thread."""
    if not _PROCESSES[work.strategy](1):
        return (f"--num_towers={work.count}",)
    return ("--num_towers=1", "--threads_per_tower=1")


def named_case(row: str) -> Case:
    """A line as `--row` names it: STRATEGY,COUNT,NETWORK,BATCH,PRECISION, of which the last three may be left out.

    Raises:
      UserError: it does not.
    """
    words = row.split(",")
    if not 2 <= len(words) <= 5 or words[0] not in _PROCESSES or not all(map(_is_count, [words[1], *words[3:4]])):
        known = ", ".join(_PROCESSES)
        raise UserError(
            f"--row={row}: give STRATEGY,COUNT[,NETWORK[,BATCH[,PRECISION]]], a strategy of {known} and numbers "
            "above 0, as towers,2,resnet20,256,bfloat16"
        )
    strategy, count, network, batch, precision = [*words, *("", "", "", "", "")[len(words) :]]
    work = Work(
        strategy, int(count), network or FLAGS.network, int(batch or FLAGS.measured_batch), precision or FLOAT32
    )
    name = f"{strategy} {count}, {work.network}, {work.batch}, {work.precision}"
    return own_case(name, work, measure="servers" if strategy == "ps" else "step")


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def peer_case(name: str, work: Work, program: str, *more: str, python: str = sys.executable) -> Case:
    """The same work by another's program, in the folder of --peers.

    Raises:
      UserError: it is not there.
    """
    path = pathlib.Path(FLAGS.peers) / program
    if not path.exists():
        raise UserError(f"--peers={FLAGS.peers}: there is no {program} in it; name the folder of the peers")
    command = (python, str(path), f"--batch={work.batch}", f"--steps={FLAGS.measured_steps}", *more)
    return Case(name, work, command, is_peer=True)
