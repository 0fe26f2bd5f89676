"""Measures training steps beside what a user would otherwise take, alternately, and prints a table.

    python -m launch.benchmark --peers=../shared/peers
        rounds of: towers, the Trainer's whole loop, Keras fit, tf.distribute mirrored; each in a fresh process

    python -m launch.benchmark --group=ring --peers=../shared/peers --torch=TORCH/bin/python
        rounds of: a ring of two processes of one thread; the same in PyTorch and in tf.distribute

    python -m launch.benchmark --group=servers --peers=../shared/peers --measured_batch=128 --measured_steps=200
        rounds of: asynchronous parameter servers with one to four workers and one or two servers; tf.distribute's

    python -m launch.benchmark --group=slow_worker --network=tiny --measured_batch=128 --measured_steps=150
        rounds of: three workers under each kind of staleness, none or one of them waiting for its input

Every line of the table is a median over rounds with the smallest and the largest; the ratios at the end are
of medians. Figures of different machines or hours don't compare; figures of one table do.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping

from absl import flags

from launch import binary
from launch.flag_values import positive
from launch.free_ports import free_addresses
from launch.measured import TINY, measure_servers, measure_step, measure_trainer
from launch.tf_config import tf_config_text
from strategies.cluster import CHIEF, SERVER, WORKER, Cluster
from towers.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "peers", None, "Folder of peer programs (keras_step.py and others) to measure in the same rounds."
)
flags.DEFINE_enum("group", "towers", ("towers", "ring", "servers", "slow_worker"), "What is measured.")
flags.DEFINE_string("torch", None, "A Python that has torch, to measure torch_step.py of the peers as well.")
flags.DEFINE_integer("rounds", 3, "How many times everything is measured.")
flags.DEFINE_integer("measured_steps", 20, "Steps measured each time.")
flags.DEFINE_integer("measured_batch", 256, "Examples in a global batch.")
flags.DEFINE_float("slow_seconds", 0.0, "How long the first worker waits for each batch, to see who waits for it.")
flags.DEFINE_string("network", "resnet20", f"Network measured; also {TINY}.")
flags.DEFINE_enum("measure", None, ("step", "trainer", "servers"), "One measurement in this process, as JSON.")
positive("rounds", "measured_steps", "measured_batch")

_CASE_SECONDS = 300
# Without waiting, each of three workers reads through the others' batches too: 90 ms a step then, and 30 in sync.
_SLOW_SECONDS = 0.03


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
      name: of the line.
      command: prints a JSON object.
      processes: how many of each role run the command, each told by TF_CONFIG who the others are; the first one's
        object is taken. {} is one process that is told of nobody.
    """

    name: str
    command: tuple[str, ...]
    processes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def own_case(name: str, *flags: str, measure: str = "step", **processes: int) -> Case:
    """A measurement of this project in fresh processes."""
    command = (
        *(sys.executable, "-m", "launch.benchmark", f"--measure={measure}", f"--network={FLAGS.network}"),
        *(f"--measured_steps={FLAGS.measured_steps}", f"--measured_batch={FLAGS.measured_batch}", *flags),
    )
    return Case(name, command, processes)


def keras_case(name: str, *flags: str, program: str = "keras_step.py") -> Case:
    """The same work by tf.distribute or Keras."""
    return Case(name, (sys.executable, *_peer(program), *flags))


def torch_case(name: str, *flags: str) -> Case:
    """The same work by PyTorch."""
    return Case(name, (FLAGS.torch, *_peer("torch_step.py"), *flags))


def _peer(program: str) -> tuple[str, ...]:
    path = pathlib.Path(FLAGS.peers) / program
    if not path.exists():
        raise UserError(f"--peers={FLAGS.peers}: there is no {program} in it; name the folder of the peers")
    return (str(path), f"--batch={FLAGS.measured_batch}", f"--steps={FLAGS.measured_steps}")


def towers_cases() -> list[Case]:
    """The rows of one process, our best first."""
    rows = [
        own_case("towers 2", "--num_towers=2"),
        own_case("towers 2, Trainer's loop", "--num_towers=2", measure="trainer"),
        own_case("towers 1", "--num_towers=1"),
        own_case("towers 8", "--num_towers=8"),
        own_case("towers 2, bfloat16", "--num_towers=2", "--precision=bfloat16"),
    ]
    if FLAGS.peers:
        rows += [keras_case(f"keras {mode}", "--mode", mode) for mode in ("fit", "mirrored")]
    return rows + (torch_cases(1) if FLAGS.peers and FLAGS.torch else [])


def ring_cases() -> list[Case]:
    """The rows of two processes of one thread."""
    own = ("--strategy=ring", "--num_towers=1", "--threads_per_tower=1")
    rows = [
        own_case("ring 2", *own, worker=2),
        own_case("ring 2, bfloat16", *own, "--precision=bfloat16", worker=2),
    ]
    if FLAGS.peers:
        rows.append(keras_case("keras ring", "--mode", "ring"))
        rows.append(keras_case("keras ring, bfloat16", "--mode", "ring", "--dtype", "bfloat16"))
    return rows + (torch_cases(2) if FLAGS.peers and FLAGS.torch else [])


def servers_cases() -> list[Case]:
    """The rows of asynchronous servers, workers of one thread each."""
    own = ("--strategy=ps", "--num_towers=1", "--threads_per_tower=1")
    rows = [
        own_case(
            f"ps, {workers} workers, {servers} servers",
            *own,
            measure="servers",
            chief=1,
            worker=workers,
            ps=servers,
        )
        for workers, servers in ((2, 1), (1, 1), (4, 1), (1, 2), (2, 2), (4, 2))
    ]
    if FLAGS.peers:
        rows.insert(
            1, keras_case("keras ps, 2 workers, 1 servers", "--model", FLAGS.network, program="ps_step.py")
        )
    return rows


def slow_worker_cases() -> list[Case]:
    """Parameter servers of each kind, without and with a worker whose input is slow."""
    own = ("--strategy=ps", "--num_towers=1", "--threads_per_tower=1")
    kinds = {
        "async": ("--staleness=async",),
        "bound 8": ("--staleness=8",),
        "sync": ("--staleness=sync",),
        "sync, 1 backup": ("--staleness=sync", "--backup_workers=1"),
    }
    rows = []
    for kind, flags_of_kind in kinds.items():
        for slow in (0.0, _SLOW_SECONDS):
            name = f"ps, {kind}, {'one slow' if slow else 'none slow'}"
            more = (*own, *flags_of_kind, f"--slow_seconds={slow}")
            rows.append(own_case(name, *more, measure="servers", chief=1, worker=3, ps=1))
    return rows


def torch_cases(num_processes: int) -> list[Case]:
    """PyTorch in both precisions; several processes meet over gloo."""
    procs = ("--procs", str(num_processes))
    return [
        torch_case(f"torch, {num_processes} processes", *procs),
        torch_case(f"torch, {num_processes} processes, bfloat16", *procs, "--dtype", "bfloat16"),
    ]


def run_case(case: Case) -> dict:
    """The JSON object that a case prints last.

    Raises:
      RuntimeError: a program failed; its last line is in the message.
    """
    processes = [
        subprocess.Popen(case.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for environment in environments(case.processes)
    ]
    try:
        # Their few lines fit in the pipes, so one may be read after the other.
        written = [process.communicate(timeout=_CASE_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, complaints) in zip(processes, written, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"{case.name} failed: {(complaints.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(written[0][0].strip().splitlines()[-1])


def environments(processes: Mapping[str, int]) -> list[dict[str, str]]:
    """What each process of a case has in its environment, the chief's or the first worker's first."""
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


def in_words(found: Mapping) -> str:
    """A measurement."""
    steps = f", {found['steps_per_second']:.1f} steps/s" if "steps_per_second" in found else ""
    counted = f", {found['counted_steps']} steps counted" if "counted_steps" in found else ""
    workers = f", by worker {list(found['worker_steps'].values())}" if "worker_steps" in found else ""
    return f"{found['images_per_second']:.0f} images/s{steps}{counted}{workers}"


def table(results: dict[str, list[dict]]) -> list[str]:
    """Markdown: a row a case, medians and extremes over the rounds."""
    lines = ["| case | images/s | min - max | first step s | loop / step |", "|---|---|---|---|---|"]
    for name, rounds in results.items():
        rates = [found["images_per_second"] for found in rounds]
        first = _median_of(rounds, "first_step_seconds", ".2f")
        loop = _median_of(rounds, "loop_over_step", ".4f")
        middle = statistics.median(rates)
        lines.append(f"| {name} | {middle:.0f} | {min(rates):.0f} - {max(rates):.0f} | {first} | {loop} |")
    return lines


def _median_of(rounds: list[dict], field: str, form: str) -> str:
    """Of those that have it; nothing where none has."""
    values = [found[field] for found in rounds if field in found]
    return format(statistics.median(values), form) if values else ""


def ratios(results: dict[str, list[dict]]) -> list[str]:
    """The comparisons that the project holds itself to: ours to each peer's of the same precision."""

    def median(name, field="images_per_second"):
        return statistics.median(found[field] for found in results[name])

    ours = {name.endswith("bfloat16"): name for name in results if name.split(",")[0] in ("towers 2", "ring 2")}
    ours |= {False: next(iter(results))}
    peers = [name for name in results if name.startswith(("keras", "torch"))]
    lines = []
    for name in peers:
        own = ours[name.endswith("bfloat16")]
        lines.append(f"{own} / {name}: {median(own) / median(name):.2f}")
    if "towers 8" in results:
        first = median("towers 8", "first_step_seconds") / median("towers 1", "first_step_seconds")
        lines.append(f"time to first step, towers 8 / towers 1: {first:.2f}")
    return lines


def main(_) -> int:
    if FLAGS.measure is not None:
        found = {"step": measure_step, "trainer": measure_trainer, "servers": measure_servers}[FLAGS.measure]()
        print(json.dumps(found), flush=True)
        return binary.DONE
    groups = {
        "towers": towers_cases,
        "ring": ring_cases,
        "servers": servers_cases,
        "slow_worker": slow_worker_cases,
    }
    rows = groups[FLAGS.group]()
    results: dict[str, list[dict]] = {row.name: [] for row in rows}
    for number in range(FLAGS.rounds):
        for row in rows:
            found = run_case(row)
            results[row.name].append(found)
            print(f"round {number + 1}: {row.name}: {in_words(found)}", flush=True)
    print("\n".join([*table(results), "", *ratios(results)]))
    return binary.DONE


def cli() -> None:
    """Console script."""
    binary.run(main)


if __name__ == "__main__":
    cli()
