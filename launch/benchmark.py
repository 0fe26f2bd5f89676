"""Measures training steps beside what a user would otherwise take, alternately, and keeps what it finds.

    python -m launch.benchmark --peers=../shared/peers
        rounds of: towers, the Trainer's whole loop, Keras fit, tf.distribute mirrored; each in a fresh process

    python -m launch.benchmark --group=ring --peers=../shared/peers --torch=TORCH/bin/python
        rounds of: a ring of two processes of one thread; the same in PyTorch and in tf.distribute

    python -m launch.benchmark --group=servers --peers=../shared/peers --network=tiny --measured_batch=128 \
            --measured_steps=600
        rounds of: asynchronous parameter servers with one to four workers and one or two servers; tf.distribute's

    python -m launch.benchmark --group=slow_worker --network=tiny --measured_batch=128 --measured_steps=150
        rounds of: three workers under each kind of staleness, none or one of them waiting for its input

    python -m launch.benchmark --group=input
        the augmented stream alone beside the training that it feeds

    python -m launch.benchmark --row=towers,2,resnet20,256,bfloat16 --row=ring,2,vgg16,128
        lines of your own: STRATEGY,COUNT[,NETWORK[,BATCH[,PRECISION]]]

    python -m launch.benchmark --compare BEFORE/benchmark.json AFTER/benchmark.json
        what differs by more than the noise; exit code 3 if something is worse by more than --worse_by

A folder gets benchmark.json (medians, extremes and standard errors, every round, the environment), the table in
Markdown, and the plots. Figures of different machines or hours don't compare; figures of one table do.
"""

import json
import os
import pathlib
import time

from absl import flags

from launch import binary
from launch.flags.checks import positive
from launch.health.machine import devices, threads
from launch.health.versions import versions
from launch.measuring.case import Case
from launch.measuring.comparison import changes, only_in_one
from launch.measuring.groups import GROUPS, cases
from launch.measuring.measured import MEASUREMENTS, TINY
from launch.measuring.plots import save_plots
from launch.measuring.results import load, results, save
from launch.measuring.running import run_case
from launch.measuring.tables import ratios, table
from towers.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "peers", None, "Folder of peer programs (keras_step.py and others) to measure in the same rounds."
)
flags.DEFINE_enum("group", "towers", list(GROUPS), "What is measured.")
flags.DEFINE_multi_string("row", [], "A line of your own: STRATEGY,COUNT[,NETWORK[,BATCH[,PRECISION]]].")
flags.DEFINE_string("torch", None, "A Python that has torch, to measure torch_step.py of the peers as well.")
flags.DEFINE_integer("rounds", 3, "How many times everything is measured.")
flags.DEFINE_integer("measured_steps", 20, "Steps measured each time.")
flags.DEFINE_integer("measured_batch", 256, "Examples in a global batch.")
flags.DEFINE_float("slow_seconds", 0.0, "How long the first worker waits for each batch, to see who waits for it.")
flags.DEFINE_string("network", "resnet20", f"Network measured; also {TINY}.")
flags.DEFINE_enum("measure", None, list(MEASUREMENTS), "One measurement in this process, as JSON.")
flags.DEFINE_string("output", None, "Folder for what is found; default: a new one under runs/.")
flags.DEFINE_string("compare", None, "A benchmark.json, to be compared with the one named behind it.")
flags.DEFINE_float("worse_by", 0.05, "Relative difference beyond the noise that --compare takes for a regression.")
positive("rounds", "measured_steps", "measured_batch", "worse_by")


def measure(rows: list[Case], directory: pathlib.Path) -> dict:
    """All rounds; what is found is saved after each, so that an interrupted benchmark keeps what it has."""
    rounds: dict[str, list[dict]] = {row.name: [] for row in rows}
    environment = environment_now()
    for number in range(FLAGS.rounds):
        for row in rows:
            found = run_case(row)
            rounds[row.name].append(found)
            print(f"round {number + 1}: {row.name}: {in_words(found)}", flush=True)
        whole = results(rows, rounds, environment)
        save(whole, directory / "benchmark.json")
    return whole


def environment_now() -> dict:
    """What the figures depend on."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions().facts,
        "devices": devices(os.environ).facts,
        "threads": threads(os.environ).facts,
        "flags": [line for name in FLAGS if FLAGS[name].present for line in FLAGS[name].serialize().split("\n")],
    }


def in_words(found: dict) -> str:
    """A measurement."""
    steps = f", {found['steps_per_second']:.1f} steps/s" if "steps_per_second" in found else ""
    counted = f", {found['counted_steps']} steps counted" if "counted_steps" in found else ""
    workers = f", by worker {list(found['worker_steps'].values())}" if "worker_steps" in found else ""
    return f"{found['images_per_second']:.0f} images/s{steps}{counted}{workers}"


def compare(first: str, second: str) -> int:
    """Prints what differs; the exit code."""
    before, after = load(first), load(second)
    found = changes(before, after)
    for line in [*found, *only_in_one(before, after)]:
        print(line)
    worse = [change for change in found if change.gain < -FLAGS.worse_by]
    print(f"{len(found)} differences beyond the noise, {len(worse)} worse by more than {FLAGS.worse_by:.0%}")
    return binary.DIFFERS if worse else binary.DONE


def output_directory() -> pathlib.Path:
    """Made anew unless it is there."""
    path = pathlib.Path(FLAGS.output or f"runs/benchmark-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output={path}: {error.strerror}; name a folder that can be written") from None
    if (path / "benchmark.json").exists():
        raise UserError(f"--output={path} holds a benchmark.json already: name another folder, or move it away")
    return path


def main(arguments: list[str]) -> int:
    if FLAGS.measure is not None:
        print(json.dumps(MEASUREMENTS[FLAGS.measure]()), flush=True)
        return binary.DONE
    if FLAGS.compare is not None:
        if len(arguments) != 2:
            raise UserError(f"--compare {FLAGS.compare}: name two files, as --compare A.json B.json")
        return compare(FLAGS.compare, arguments[1])
    rows = cases()
    directory = output_directory()
    found = measure(rows, directory)
    lines = [*table(found), "", *ratios(found)]
    (directory / "benchmark.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    save_plots(found, directory)
    print("\n".join([*lines, "", f"kept in {directory}"]))
    return binary.DONE


def cli() -> None:
    """Console script."""
    binary.run(main, takes_operand=True)


if __name__ == "__main__":
    cli()
