"""Measures training steps beside what a user would otherwise take, alternately, and prints a table.

    python -m launch.benchmark --peers=../shared/peers
        rounds of: towers, the Trainer's whole loop, Keras fit, tf.distribute mirrored; each in a fresh process

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
from models.networks import build_network
from models.own_task import OwnTask
from strategies.callbacks import Callback
from strategies.progress_display import ProgressDisplay
from strategies.trainer import Trainer
from strategies.trainer_options import TrainerOptions
from towers.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "peers", None, "Folder of peer programs (keras_step.py and others) to measure in the same rounds."
)
flags.DEFINE_integer("rounds", 3, "How many times everything is measured.")
flags.DEFINE_integer("measured_steps", 20, "Steps measured each time.")
flags.DEFINE_integer("measured_batch", 256, "Examples in a global batch.")
flags.DEFINE_string("network", "resnet20", "Network measured.")
flags.DEFINE_enum("measure", None, ("step", "trainer"), "One measurement in this process, as JSON.")
positive("rounds", "measured_steps", "measured_batch")

_CASE_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: a name and the command that prints a JSON object."""

    name: str
    command: tuple[str, ...]


def own_case(name: str, *, measure: str = "step", towers: int, precision: str = "float32") -> Case:
    """A measurement of this project in a fresh process."""
    command = (
        *(sys.executable, "-m", "launch.benchmark", f"--measure={measure}"),
        *(f"--num_towers={towers}", f"--precision={precision}", f"--network={FLAGS.network}"),
        *(f"--measured_steps={FLAGS.measured_steps}", f"--measured_batch={FLAGS.measured_batch}"),
    )
    return Case(name, command)


def peer_cases(folder: pathlib.Path) -> list[Case]:
    """The TensorFlow peers that do the same work.

    Raises:
      UserError: the folder has no keras_step.py.
    """
    program = folder / "keras_step.py"
    if not program.exists():
        raise UserError(f"--peers={folder}: there is no keras_step.py in it; name the folder of the peers")
    shared = (sys.executable, str(program), f"--batch={FLAGS.measured_batch}", f"--steps={FLAGS.measured_steps}")
    return [Case(f"keras {mode}", (*shared, "--mode", mode)) for mode in ("fit", "mirrored")]


def cases() -> list[Case]:
    """The rows of the table."""
    rows = [
        own_case("towers 2", towers=2),
        own_case("towers 2, Trainer's loop", measure="trainer", towers=2),
        own_case("towers 1", towers=1),
        own_case("towers 8", towers=8),
        own_case("towers 2, bfloat16", towers=2, precision="bfloat16"),
    ]
    return rows + (peer_cases(pathlib.Path(FLAGS.peers)) if FLAGS.peers else [])


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
      RuntimeError: the program failed; its last line is in the message.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(case.command, env=environment, capture_output=True, text=True, timeout=_CASE_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{case.name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(results: dict[str, list[dict]]) -> list[str]:
    """Markdown: a row a case, medians and extremes over the rounds."""
    lines = ["| case | images/s | min - max | first step s | loop / step |", "|---|---|---|---|---|"]
    for name, rounds in results.items():
        rates = [found["images_per_second"] for found in rounds]
        first = statistics.median(found["first_step_seconds"] for found in rounds)
        loops = [found["loop_over_step"] for found in rounds if "loop_over_step" in found]
        loop = f"{statistics.median(loops):.4f}" if loops else ""
        middle = statistics.median(rates)
        lines.append(f"| {name} | {middle:.0f} | {min(rates):.0f} - {max(rates):.0f} | {first:.2f} | {loop} |")
    return lines


def ratios(results: dict[str, list[dict]]) -> list[str]:
    """The comparisons that the project holds itself to."""

    def median(name, field="images_per_second"):
        return statistics.median(found[field] for found in results[name])

    lines = [f"towers 2 / {name}: {median('towers 2') / median(name):.2f}" for name in results if "keras" in name]
    first = median("towers 8", "first_step_seconds") / median("towers 1", "first_step_seconds")
    return [*lines, f"time to first step, towers 8 / towers 1: {first:.2f}"]


def main(_) -> int:
    if FLAGS.measure is not None:
        found = {"step": measure_step, "trainer": measure_trainer}[FLAGS.measure]()
        print(json.dumps(found), flush=True)
        return binary.DONE
    rows = cases()
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
