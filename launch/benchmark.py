"""Measures training speed, of this project and of peer programs in alternating rounds, and saves the results.

    python -m launch.benchmark --peers=../shared/peers
        measures towers, the Trainer's whole loop, Keras fit and tf.distribute mirrored, each in a fresh process

    python -m launch.benchmark --group=ring --peers=../shared/peers --torch=TORCH/bin/python
        measures a ring of two processes of one thread each; the same in PyTorch and in tf.distribute

    python -m launch.benchmark --group=servers --peers=../shared/peers --network=tiny --measured_batch=128 \
            --measured_steps=600
        measures asynchronous parameter servers, one to four workers and one or two servers, and tf.distribute's

    python -m launch.benchmark --group=slow_worker --network=tiny --measured_batch=128 --measured_steps=150
        measures three workers under each kind of staleness, without and with one worker whose input is slow

    python -m launch.benchmark --group=input
        measures the augmented input stream alone, and the training that reads it

    python -m launch.benchmark --row=towers,2,resnet20,256,bfloat16 --row=ring,2,vgg16,128
        measures rows of your own: STRATEGY,COUNT[,NETWORK[,BATCH[,PRECISION]]]

    python -m launch.benchmark --compare BEFORE/benchmark.json AFTER/benchmark.json
        prints differences larger than the noise; exit code 3 if a figure is worse by more than --worse_by

The folder --output gets benchmark.json (medians, extremes and standard errors, every round, the environment), the
table in Markdown, and the plots. Compare only figures measured on the same machine at about the same time, such as
those of one table.
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
from launch.measuring.measured_program import MEASUREMENTS, TINY
from launch.measuring.plots import save_plots
from launch.measuring.results import load, results, save
from launch.measuring.running import run_case
from launch.measuring.tables import ratios, table
from towers.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "peers", None, "Folder of peer programs (keras_step.py and others) to measure in the same rounds."
)
flags.DEFINE_enum("group", "towers", list(GROUPS), "Named set of rows to measure; --row overrides it.")
flags.DEFINE_multi_string(
    "row",
    [],
    "Row to measure instead of a --group, as STRATEGY[/ENGINE],COUNT[,NETWORK[,BATCH[,PRECISION]]], "
    "e.g. towers,2,resnet20,256,bfloat16 or ring/own,2. Repeat the flag for several rows.",
)
flags.DEFINE_string(
    "torch", None, "Python interpreter with PyTorch installed: also measures torch_step.py in --peers."
)
flags.DEFINE_integer("rounds", 3, "Number of rounds; each measures every row once. More rounds reduce the noise.")
flags.DEFINE_integer("measured_steps", 20, "Steps to measure per row and round.")
flags.DEFINE_integer("measured_batch", 256, "Examples in a global batch.")
flags.DEFINE_float(
    "slow_seconds",
    0.0,
    "Seconds by which the first worker's input delays each of its batches, to measure the effect of a straggler.",
)
flags.DEFINE_string("network", "resnet20", f"Network to measure: a name as for launch.train's --model, or {TINY}.")
flags.DEFINE_enum(
    "measure",
    None,
    list(MEASUREMENTS),
    "Run one measurement in this process and print it as JSON. The benchmark starts its processes with this flag.",
)
flags.DEFINE_string("output", None, "Folder to write the results to. Default: a new folder under runs/.")
flags.DEFINE_string("compare", None, "First of two benchmark.json files to compare: --compare BEFORE AFTER.")
flags.DEFINE_float(
    "worse_by", 0.05, "Relative difference, beyond the noise, from which --compare counts a figure as worse."
)
positive("rounds", "measured_steps", "measured_batch", "worse_by")


def measure(rows: list[Case], directory: pathlib.Path) -> dict:
    """Measures all rounds; saves the results after each, so an interrupted benchmark loses only the last round."""
    rounds: dict[str, list[dict]] = {row.name: [] for row in rows}
    environment = environment_now()
    for index in range(FLAGS.rounds):
        for row in rows:
            found = run_case(row)
            rounds[row.name].append(found)
            print(f"round {index + 1}: {row.name}: {in_words(found)}", flush=True)
        whole = results(rows, rounds, environment)
        save(whole, directory / "benchmark.json")
    return whole


def environment_now() -> dict:
    """Everything that the figures depend on: time, versions, devices, threads and flags."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions().facts,
        "devices": devices(os.environ).facts,
        "threads": threads(os.environ).facts,
        "flags": [line for name in FLAGS if FLAGS[name].present for line in FLAGS[name].serialize().split("\n")],
    }


def in_words(found: dict) -> str:
    """A measurement in one line."""
    steps = f", {found['steps_per_second']:.1f} steps/s" if "steps_per_second" in found else ""
    counted = f", {found['counted_steps']} steps counted" if "counted_steps" in found else ""
    workers = f", by worker {list(found['worker_steps'].values())}" if "worker_steps" in found else ""
    return f"{found['images_per_second']:.0f} images/s{steps}{counted}{workers}"


def compare(first: str, second: str) -> int:
    """Prints the differences between two benchmark.json files; returns the exit code."""
    before, after = load(first), load(second)
    found = changes(before, after)
    for line in [*found, *only_in_one(before, after)]:
        print(line)
    worse = [change for change in found if change.gain < -FLAGS.worse_by]
    print(f"{len(found)} differences beyond the noise, {len(worse)} worse by more than {FLAGS.worse_by:.0%}")
    return binary.DIFFERS if worse else binary.DONE


def output_directory() -> pathlib.Path:
    """The folder for the results, created if it does not exist.

    Raises:
      UserError: the folder can't be created, or already contains results.
    """
    path = pathlib.Path(FLAGS.output or f"runs/benchmark-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output={path}: {error.strerror}; choose a writable folder") from None
    if (path / "benchmark.json").exists():
        raise UserError(
            f"--output={path} already contains a benchmark.json; choose another folder or move it away"
        )
    return path


def main(arguments: list[str]) -> int:
    if FLAGS.measure is not None:
        print(json.dumps(MEASUREMENTS[FLAGS.measure]()), flush=True)
        return binary.DONE
    if FLAGS.compare is not None:
        if len(arguments) != 2:
            raise UserError(
                f"--compare {FLAGS.compare}: two files are needed; type --compare BEFORE.json AFTER.json"
            )
        return compare(FLAGS.compare, arguments[1])
    rows = cases()
    directory = output_directory()
    found = measure(rows, directory)
    lines = [*table(found), "", *ratios(found)]
    (directory / "benchmark.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    save_plots(found, directory)
    print("\n".join([*lines, "", f"saved in {directory}"]))
    return binary.DONE


def cli() -> None:
    """Console script."""
    binary.run(main, takes_operand=True)


if __name__ == "__main__":
    cli()
