"""Measures training speed, of this project and of peer programs in alternating rounds, and saves the results.

    python -m launch.benchmark --peers=../shared/peers
        measures towers, the Trainer's whole loop, Keras fit and tf.distribute mirrored, each in a fresh process

    python -m launch.benchmark --group=ring --peers=../shared/peers --torch=TORCH/bin/python
        measures a ring of two processes of one thread each; the same in PyTorch and in tf.distribute

    python -m launch.benchmark --group=servers --peers=../shared/peers --network=tiny --measured_batch=128 \
            --measured_steps=600
        measures asynchronous parameter servers (one to four workers, one or two servers) and tf.distribute's

    python -m launch.benchmark --group=engines_ring --network=vgg16 --link=1gbit --peers=../shared/peers
        measures rings of two and four processes on both engines and tf.distribute's; each process is on a host of
        its own (a network namespace), with a link of 1 Gbit/s to the others; --group=engines_servers does the same

    python -m launch.benchmark --group=slow_worker --network=tiny --measured_batch=128 --measured_steps=150
        measures three workers under each kind of staleness, without and with one worker whose input is slow

    python -m launch.benchmark --group=input
        measures the augmented input stream alone, and the training that reads it

    python -m launch.benchmark --group=cifar_fast --torch=TORCH/bin/python
        measures the network and update rule of --recipe=cifar_fast in float32 and bfloat16; the same in PyTorch

    python -m launch.benchmark --group=short_steps --torch=TORCH/bin/python
        measures a small network with one and with several steps per execution of a graph; Keras's fit both ways;
        PyTorch

    python -m launch.benchmark --measure=batch_stats --network=resnet20 --num_towers=2 --measured_steps=60
        measures two towers with the statistics of their parts and of the whole batch, alternately in one process;
        --group=batch_stats each in a process of its own

    python -m launch.benchmark --group=larger_than_a_device --network=transformer --measured_batch=64
        measures pipelines of two devices beside one device; divided, copied and sliced parameters and
        recomputation beside plain towers; --group=pipeline, sharded or recompute measures a part of it

    python -m launch.benchmark --group=kernels --measured_steps=9
        measures the CPU time of our own kernels and TensorFlow's, alternately in one process

    python -m launch.benchmark --isa=avx2 --peers=../shared/peers
        measures as on a CPU without AVX-512: the kernels of oneDNN, XLA, NumPy and PyTorch are limited

    python -m launch.benchmark --measure=profile --network=resnet20 --num_towers=2 --measured_steps=10
        prints where the CPU time of a step goes: convolutions, their gradients, batch norm, ReLU, additions and
        so on; with --isa=avx2 as on a CPU with AVX2

    python -m launch.benchmark --group=gpu
        measures one GPU and all GPUs here: parameters on the CPU, copied and divided; mirrored; bfloat16

    python -m launch.benchmark --row=towers,2,resnet20,256,bfloat16 --row=ring,2,vgg16,128
        measures rows of your own: STRATEGY,COUNT[,NETWORK[,BATCH[,PRECISION]]]

    python -m launch.benchmark --compare BEFORE/benchmark.json AFTER/benchmark.json
        prints the differences of means that exceed the noise (Welch's test, 95%); exit code 3 if a figure is worse
        by more than --worse_by

The folder --output gets benchmark.json (medians, extremes and standard errors, every round, the environment), the
table in Markdown, and the plots. Compare only figures measured on the same machine at about the same time, such as
those of one table.

If it is interrupted (Ctrl-C, SIGTERM; exit code 75) it saves the complete rows, the table and the plots. If a row
fails it measures the others, and ends with that row's error.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags

from launch import binary
from launch.flags.checks import positive
from launch.flags.paths import define_path
from launch.health.machine import devices, threads
from launch.health.versions import versions
from launch.measuring.case import MEGABITS, NO_LINK, Case, measured_networks
from launch.measuring.comparison import changes, not_compared, only_in_one
from launch.measuring.forwarded_flags import check_flags
from launch.measuring.groups import GROUPS, cases
from launch.measuring.imitated_cpu import ISAS, NO_ISA, check_isa, imitated, imitation, why_not_imitated
from launch.measuring.masked_cpuid import remove_as_successor, successor_removes
from launch.measuring.measured_batch_stats import measure_batch_stats
from launch.measuring.measured_program import MEASUREMENTS
from launch.measuring.plots import save_plots
from launch.measuring.profiled_step import measure_profile
from launch.measuring.results import load, results, save, saving
from launch.measuring.running import Interrupted, run_case
from launch.measuring.tables import rate_text, ratios, table
from launch.networks.network_namespaces import why_no_hosts
from launch.supervision.own_program import own_program
from strategies.errors import PeerLost
from strategies.training.stop_signals import StopSignals
from towers.errors import UserError

FLAGS = flags.FLAGS
RESULTS = "benchmark.json"
_MEASUREMENTS = {**MEASUREMENTS, "batch_stats": measure_batch_stats, "profile": measure_profile}
define_path("peers", None, "Folder of peer programs (keras_step.py and others) to measure in the same rounds.")
flags.DEFINE_enum("group", "towers", list(GROUPS), "Named set of rows to measure; --row overrides it.")
flags.DEFINE_multi_string(
    "row",
    [],
    "Row to measure instead of a --group, as STRATEGY[/ENGINE],COUNT[,NETWORK[,BATCH[,PRECISION]]], "
    "e.g. towers,2,resnet20,256,bfloat16 or ring/own,2. Repeat the flag for several rows.",
)
define_path(
    "torch",
    None,
    "Python interpreter with PyTorch installed: also measures torch_step.py in --peers, or the peers of the "
    "groups cifar_fast and short_steps.",
)
flags.DEFINE_integer("rounds", 3, "Number of rounds; each measures every row once. More rounds reduce the noise.")
flags.DEFINE_integer("measured_steps", 20, "Steps to measure per row and round.")
flags.DEFINE_integer("measured_batch", 256, "Examples in a global batch.")
flags.DEFINE_float(
    "slow_seconds",
    0.0,
    "Seconds by which the first worker's input delays each of its batches, to measure the effect of a straggler.",
)
flags.DEFINE_enum(
    "network", "resnet20", list(measured_networks()), "Network to measure, as launch.train's --model."
)
flags.DEFINE_enum(
    "measure",
    None,
    list(_MEASUREMENTS),
    "Run one measurement in this process and print it as JSON. The benchmark starts its processes with this flag. "
    "profile: also print a table of a step's CPU time by kind of operation.",
)
define_path("output", None, "Folder to write the results to. Default: a new folder under runs/.")
flags.DEFINE_string("compare", None, "First of two benchmark.json files to compare: --compare BEFORE AFTER.")
flags.DEFINE_float(
    "worse_by", 0.05, "Relative difference, beyond the noise, from which --compare counts a figure as worse."
)
flags.DEFINE_enum(
    "link",
    NO_LINK,
    [NO_LINK, *MEGABITS],
    "Rate at which each process of a row can send and receive. Each process then gets a network namespace of its "
    "own, which needs root and the programs ip and tc. none: all use this machine's loopback.",
)
flags.DEFINE_enum(
    "isa",
    NO_ISA,
    ISAS,
    "Measure as on a CPU that has only these instructions: avx2, avx512 without bfloat16, or avx512_bf16 without "
    "AMX. It limits oneDNN, XLA, NumPy, PyTorch and MKL in all measured processes. On CPUs like the first two "
    "TensorFlow does not switch oneDNN on by itself, so peers run without it. none: this CPU.",
)
flags.DEFINE_list(
    "processes", ["2", "4"], "Numbers of processes that compute, in the groups engines_ring and engines_servers."
)
flags.DEFINE_float(
    "row_timeout_seconds",
    1800.0,
    "Seconds that a row may take in a round, start included. Raise it for large networks on slow CPUs.",
)
positive("rounds", "measured_steps", "measured_batch", "worse_by", "row_timeout_seconds")


def measure(rows: Sequence[Case], directory: pathlib.Path, is_interrupted: Callable[[], bool]) -> None:
    """Measures all rounds; saves the results after each row. A row that fails is left out from then on.

    Raises:
      Interrupted: `is_interrupted()` became True.
      PeerLost: rows failed; raised for the first one, after the others are measured.
      UserError: a row failed because of a user's mistake; the remaining rows are not measured.
    """
    rounds: dict[str, list[dict]] = {row.name: [] for row in rows}
    failures: dict[str, PeerLost] = {}
    environment = environment_now()
    for index in range(FLAGS.rounds):
        for row in (row for row in rows if not row.left_out and row.name not in failures):
            try:
                found = run_case(row, timeout_seconds=FLAGS.row_timeout_seconds, is_interrupted=is_interrupted)
            except PeerLost as error:
                failures[row.name] = error
                print(f"round {index + 1}: {error}; further rounds skip it", flush=True)
                continue
            rounds[row.name].append(found)
            print(f"round {index + 1}: {row.name}: {in_words(found)}", flush=True)
            save(results(rows, rounds, environment), directory / RESULTS)
    for error in failures.values():
        raise error


def environment_now() -> dict:
    """Everything that the figures depend on: time, versions, devices, threads and flags."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions().facts,
        "devices": devices(os.environ).facts,
        "threads": threads(os.environ).facts,
        **({} if FLAGS.isa == NO_ISA else {"imitated CPU": imitated()}),
        "flags": [line for name in FLAGS if FLAGS[name].present for line in FLAGS[name].serialize().split("\n")],
    }


def in_words(found: dict) -> str:
    """A row's measurement in one round, as one line of text."""
    if "kernels" in found:
        slower = [one["kernel"] for one in found["kernels"] if one["on"] and one["ratio"] > 1]
        return f"{len(found['kernels'])} kernels, slower than TensorFlow's: {'; '.join(slower) or 'none'}"
    steps = f", {found['steps_per_second']:.1f} steps/s" if "steps_per_second" in found else ""
    counted = f", {found['counted_steps']} steps counted" if "counted_steps" in found else ""
    workers = f", by worker {list(found['worker_steps'].values())}" if "worker_steps" in found else ""
    return f"{rate_text(found['images_per_second'])} images/s{steps}{counted}{workers}"


def compare(first: str, second: str) -> int:
    """Prints the differences between two benchmark.json files; returns the exit code."""
    before, after = load(first), load(second)
    found = changes(before, after)
    for line in [*found, *not_compared(before, after), *only_in_one(before, after)]:
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
    if (path / RESULTS).exists():
        raise UserError(f"--output={path} already contains a {RESULTS}; choose another folder or move it away")
    return path


def check_link(rows: Sequence[Case]) -> None:
    """Raises UserError if --link has no effect on these rows, or if this machine can't have such links."""
    if FLAGS.link == NO_LINK:
        return
    if all(row.work.link == NO_LINK for row in rows):
        raise UserError(
            f"--link={FLAGS.link}: no row has several processes, so there is nothing to link; omit --link, or "
            "measure rows of ring or ps"
        )
    reason = why_no_hosts()
    if reason:
        raise UserError(
            f"--link={FLAGS.link} needs network namespaces and the programs ip and tc, but this machine refused: "
            f"{reason}; run it as root on Linux with iproute2 installed, or omit --link"
        )


def measure_and_report(rows: Sequence[Case], directory: pathlib.Path) -> int:
    """Measures the rows and reports what was measured, also if it is interrupted; returns the exit code."""
    with StopSignals() as signals:
        try:
            measure(rows, directory, signals.requested)
        except Interrupted:
            binary.warn(f"interrupted by {signals.name}: the unfinished row is discarded")
            return binary.INTERRUPTED
        finally:
            report(directory)
    return binary.DONE


def report(directory: pathlib.Path) -> None:
    """Prints the table of the results in this folder and saves it there, with plots; without results, says so."""
    if not (directory / RESULTS).exists():
        print(f"no row was measured, so nothing is saved in {directory}")
        return
    found = load(str(directory / RESULTS))
    lines = [*table(found), "", *ratios(found)]
    print("\n".join(lines), end="\n\n")
    with saving(directory):
        (directory / "benchmark.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        save_plots(found, directory)
    print(f"saved in {directory}")


def check_measure() -> None:
    """Raises UserError if --measure is combined with --row or --group, which it would ignore."""
    for name in ("row", "group"):
        if FLAGS[name].present:
            raise UserError(
                f"--measure={FLAGS.measure} with --{name}: it measures what other flags name, for example "
                f"--network=resnet20 --num_towers=2; omit --{name}, or --measure to measure rows"
            )


def start_on_imitated_cpu() -> NoReturn:
    """Restarts this program as on the CPU that --isa names: libraries read their variables when they are loaded.

    Raises:
      UserError: our programs can't compute in the precision of --precision on that CPU.
    """
    if reason := why_not_imitated(FLAGS.isa, FLAGS.precision):
        raise UserError(f"--isa={FLAGS.isa} with --precision={FLAGS.precision}: {reason}; use float32")
    command, variables = own_program("launch.benchmark", *sys.argv[1:], f"--isa={NO_ISA}")
    imitating = {**imitation(FLAGS.isa, is_peer=False), **successor_removes()}
    os.execve(command[0], command, {**os.environ, **variables, **imitating})


def main(arguments: list[str]) -> int:
    check_isa(FLAGS.isa)
    if FLAGS.compare is None and len(arguments) > 1:
        raise UserError(binary.no_flag(arguments[1]))
    if FLAGS.measure is not None:
        check_measure()
        if FLAGS.isa != NO_ISA:
            start_on_imitated_cpu()
        remove_as_successor()
        print(json.dumps(_MEASUREMENTS[FLAGS.measure]()), flush=True)
        return binary.DONE
    if FLAGS.compare is not None:
        if len(arguments) != 2:
            raise UserError(
                f"--compare {FLAGS.compare}: two files are needed; type --compare BEFORE.json AFTER.json"
            )
        return compare(FLAGS.compare, arguments[1])
    check_flags()
    rows = cases()
    check_link(rows)
    return measure_and_report(rows, output_directory())


def cli() -> None:
    """Console script."""
    binary.run(main, takes_operand=True, trains=False)


if __name__ == "__main__":
    cli()
