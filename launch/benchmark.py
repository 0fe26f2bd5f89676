"""Measures training steps beside what a user would otherwise take, alternately, and prints a table.

    python -m launch.benchmark --peers=../shared/peers
        rounds of: towers, the Trainer's whole loop, Keras fit, tf.distribute mirrored; each in a fresh process

    python -m launch.benchmark --group=ring --peers=../shared/peers --torch=TORCH/bin/python
        rounds of: a ring of two processes of one thread; the same in PyTorch and in tf.distribute

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
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import flags

from launch import binary, training
from launch.flag_values import positive
from launch.free_ports import free_addresses
from launch.tf_config import tf_config_text
from models.networks import build_network
from models.own_task import OwnTask
from strategies.callbacks import Callback
from strategies.cluster import WORKER, Cluster
from strategies.progress_display import ProgressDisplay
from strategies.trainer import Trainer
from strategies.trainer_options import TrainerOptions
from towers.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "peers", None, "Folder of peer programs (keras_step.py and others) to measure in the same rounds."
)
flags.DEFINE_enum("group", "towers", ("towers", "ring"), "What is measured: one process, or two.")
flags.DEFINE_string("torch", None, "A Python that has torch, to measure torch_step.py of the peers as well.")
flags.DEFINE_integer("rounds", 3, "How many times everything is measured.")
flags.DEFINE_integer("measured_steps", 20, "Steps measured each time.")
flags.DEFINE_integer("measured_batch", 256, "Examples in a global batch.")
flags.DEFINE_string("network", "resnet20", "Network measured.")
flags.DEFINE_enum("measure", None, ("step", "trainer"), "One measurement in this process, as JSON.")
positive("rounds", "measured_steps", "measured_batch")

_CASE_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
      name: of the line.
      command: prints a JSON object.
      num_workers: processes of the command, each told by TF_CONFIG who the others are; the first one's is taken.
    """

    name: str
    command: tuple[str, ...]
    num_workers: int = 1


def own_case(name: str, *flags: str, measure: str = "step", num_workers: int = 1) -> Case:
    """A measurement of this project in fresh processes."""
    command = (
        *(sys.executable, "-m", "launch.benchmark", f"--measure={measure}", f"--network={FLAGS.network}"),
        *(f"--measured_steps={FLAGS.measured_steps}", f"--measured_batch={FLAGS.measured_batch}", *flags),
    )
    return Case(name, command, num_workers)


def keras_case(name: str, *flags: str) -> Case:
    """The same work by tf.distribute or Keras."""
    return Case(name, (sys.executable, *_peer("keras_step.py"), *flags))


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
        own_case("ring 2", *own, num_workers=2),
        own_case("ring 2, bfloat16", *own, "--precision=bfloat16", num_workers=2),
    ]
    if FLAGS.peers:
        rows.append(keras_case("keras ring", "--mode", "ring"))
        rows.append(keras_case("keras ring, bfloat16", "--mode", "ring", "--dtype", "bfloat16"))
    return rows + (torch_cases(2) if FLAGS.peers and FLAGS.torch else [])


def torch_cases(num_processes: int) -> list[Case]:
    """PyTorch in both precisions; several processes meet over gloo."""
    procs = ("--procs", str(num_processes))
    return [
        torch_case(f"torch, {num_processes} processes", *procs),
        torch_case(f"torch, {num_processes} processes, bfloat16", *procs, "--dtype", "bfloat16"),
    ]


def measured_task() -> OwnTask:
    """One batch of random images, again and again, already in memory: the same work as the peers do."""
    generator = np.random.default_rng(0)
    batch = FLAGS.measured_batch
    images = generator.random((batch, 32, 32, 3), np.float32)
    labels = generator.integers(0, 10, batch)
    data = tf.data.Dataset.from_tensors((images, labels))
    return OwnTask(
        model=lambda: build_network(FLAGS.network, image_shape=(32, 32, 3), num_classes=10),
        train_data=data,
        eval_data=data,
        losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        batch_size=batch,
    )


def measure_step() -> dict:
    """Steps one at a time; the first one traces and compiles."""
    FLAGS.steps = FLAGS.measured_steps + 3
    strategy = training.build_strategy(measured_task())
    started = time.perf_counter()
    strategy.run_steps(1)
    first_seconds = time.perf_counter() - started
    strategy.run_steps(2)
    seconds = [strategy.run_steps(1).seconds for _ in range(FLAGS.measured_steps)]
    return {
        "images_per_second": FLAGS.measured_batch / statistics.median(seconds),
        "first_step_seconds": first_seconds,
    }


class TimedEngine:
    """An engine that keeps the time spent in its steps, each waited for."""

    def __init__(self, engine):
        self._engine, self.seconds = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train(self, batch, rate):
        started = time.perf_counter()
        outcome = self._engine.train(batch, rate)
        float(outcome.loss_sum)
        self.seconds.append(time.perf_counter() - started)
        return outcome


class ReportTimes(Callback):
    """When each report came, and of which step."""

    def __init__(self):
        self.reports: list[tuple[int, float]] = []

    def steps(self, report):
        self.reports.append((report.step, time.perf_counter()))


def measure_trainer() -> dict:
    """The same steps under a Trainer with its files and reports: all that it adds, in the same steps."""
    FLAGS.steps = FLAGS.measured_steps + 3
    strategy = training.build_strategy(measured_task())
    strategy.engine = engine = TimedEngine(strategy.engine)
    times = ReportTimes()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainerOptions(steps=FLAGS.steps, directory=folder, evaluate_every_epochs=None)
        Trainer(strategy, options, callbacks=[ProgressDisplay(), times]).fit()
    (first, begun), (last, ended) = times.reports[2], times.reports[-1]
    bare_seconds = sum(engine.seconds[first:last])
    return {
        "images_per_second": FLAGS.measured_batch * (last - first) / (ended - begun),
        "first_step_seconds": engine.seconds[0],
        "loop_over_step": (ended - begun) / bare_seconds,
    }


def run_case(case: Case) -> dict:
    """The JSON object that a case prints last.

    Raises:
      RuntimeError: a program failed; its last line is in the message.
    """
    processes = [
        subprocess.Popen(case.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for environment in environments(case.num_workers)
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


def environments(num_workers: int) -> list[dict[str, str]]:
    """What each process of a case has in its environment."""
    shared = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    shared.pop("TF_CONFIG", None)
    if num_workers == 1:
        return [shared]
    addresses = {WORKER: tuple(free_addresses(num_workers))}
    clusters = [Cluster(addresses=addresses, role=WORKER, index=rank) for rank in range(num_workers)]
    return [{**shared, "TF_CONFIG": tf_config_text(cluster)} for cluster in clusters]


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
        found = {"step": measure_step, "trainer": measure_trainer}[FLAGS.measure]()
        print(json.dumps(found), flush=True)
        return binary.DONE
    rows = {"towers": towers_cases, "ring": ring_cases}[FLAGS.group]()
    results: dict[str, list[dict]] = {row.name: [] for row in rows}
    for number in range(FLAGS.rounds):
        for row in rows:
            found = run_case(row)
            results[row.name].append(found)
            print(f"round {number + 1}: {row.name}: {found['images_per_second']:.0f} images/s", flush=True)
    print("\n".join([*table(results), "", *ratios(results)]))
    return binary.DONE


def cli() -> None:
    """Console script."""
    binary.run(main)


if __name__ == "__main__":
    cli()
