"""Predicts the memory of training, for each mode side by side, without training.

    python -m launch.memory --model=resnet20 --batch_size=256 --num_towers=2
        traces a step and prints bytes per device: parameters, gradients, optimizer state, activations, buffers

    python -m launch.memory --task=text --model=transformer --device_memory=16GiB
        prints the largest batch that fits a device too

    python -m launch.memory --strategy=pipeline --stages=2 --device_memory=16GiB
        the table is the same; the largest batch is that of the mode that the flags choose

    python -m launch.memory --model=vgg16 --measure
        runs each mode of one process in a fresh process for some steps, and prints the measured peak too

It takes the flags of launch.train that say what a step computes and on which devices. A row with a * is computed
by formulas, the others come from the mode's graph. Not in the figures: the process without TensorFlow's
tensors (some 600 MiB), the input pipeline, what the allocator loses between tensors, and cuDNN's workspace.

Exit codes: launch/binary.py.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launch import binary
from launch.flags.belonging import check_belonging
from launch.flags.branches import branches_from_flags
from launch.flags.checks import numbers_from, positive
from launch.flags.devices import devices_from_flags
from launch.flags.pipeline import pipeline_from_flags
from launch.flags.precision import resolve_precision
from launch.flags.recipes import apply_recipe
from launch.flags.run import run_length
from launch.flags.servers import servers_options
from launch.flags.slices import slices_from_flags
from launch.flags.step import options_from_flags
from launch.flags.task import task_from_flags
from launch.forecast.asked_mode import asked_mode
from launch.forecast.byte_text import byte_text, bytes_from
from launch.forecast.columns import MODES, Run, columns_of
from launch.forecast.measured_modes import measure_here, measured
from launch.forecast.modes_of_a_process import TOWERS, ProcessModes
from launch.forecast.table import as_json, saved_by_recomputation, saved_by_zero, table
from launch.measuring.running import Interrupted
from strategies.registry import build_strategy
from strategies.slices import SliceOptions
from towers.branches.options import BranchOptions
from towers.devices import Devices
from towers.errors import UserError
from towers.memory.largest_batch import largest_batch
from towers.memory.shaped_graph import BatchTooLarge
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.task import Task

FLAGS = flags.FLAGS
# Width of the table, in characters, if the output is no terminal.
_WIDTH_OF_FILES = 120
flags.DEFINE_string(
    "device_memory",
    None,
    "Memory of a device, as 16GiB or 512MiB: also print the largest batch that fits. CPU towers share one memory.",
)
flags.DEFINE_bool("measure", False, "Also run each mode of one process in a fresh process, and print its peak.")
flags.DEFINE_integer(
    "measured_steps",
    4,
    "Steps that --measure runs in each mode. The first one builds the graph; the largest peak of the others is "
    "printed, because threads run a step's operations in a different order each time.",
)
flags.DEFINE_bool(
    "measure_here", False, "Measure one mode in this process. --measure starts its processes with this flag."
)
flags.DEFINE_integer("workers", 2, "Number of workers in the rows of rings and parameter servers.")
flags.DEFINE_integer("servers", 1, "Number of parameter servers in the table.")
flags.DEFINE_bool("json", False, "Print one JSON object instead of the table.")
positive("measured_steps", "workers", "servers")


def main(_) -> int:
    limit = None if FLAGS.device_memory is None else bytes_from("device_memory", FLAGS.device_memory)
    if FLAGS.verify:
        raise UserError("--verify: the memory of its two runs is not predicted; omit it")
    if FLAGS.xla:
        raise UserError("--xla: what a compiled tower needs is known only when it runs; omit it for a prediction")
    devices = _configured()
    task = task_from_flags()
    options = dataclasses.replace(options_from_flags(run_length(task)), xla=False)
    modes = ProcessModes(
        task,
        _placed(task, devices, options),
        options,
        pipeline_from_flags() or PipelineOptions(),
        slices_from_flags() or SliceOptions(),
        branches_from_flags() or BranchOptions(),
        numbers_from("tower_shares"),
    )
    if FLAGS.measure_here:
        engine = modes.strategy(asked_mode(modes.devices)).engine
        print(json.dumps(measure_here(engine, task, FLAGS.measured_steps)))
        return binary.DONE
    run = Run(modes, FLAGS.workers, FLAGS.servers, servers_options())
    with _progress(len(MODES)) as show:
        columns, refusals = columns_of(run, show)
    peaks: Mapping[str, float] = {}
    if FLAGS.measure:
        runnable = [column for column in columns if column.mode is not None]
        try:
            with _progress(len(runnable)) as show:
                peaks = measured(modes, runnable, show)
        except Interrupted:
            return binary.INTERRUPTED
    largest = None if limit is None else _largest(modes, limit)
    if FLAGS.json:
        found = {"batch_size": task.batch_size, "modes": as_json(columns, peaks), "left_out": refusals}
        print(json.dumps({**found, "largest_batch": largest}))
        return binary.DONE
    print(f"{FLAGS.model}, {run.num_parameters:,} parameters, batch of {task.batch_size}")
    count = max(2, run.num_towers)
    width = shutil.get_terminal_size(fallback=(_WIDTH_OF_FILES, 0)).columns
    lines = [*table(columns, peaks, width), "", *saved_by_zero(run.num_parameters, run.bytes_per_parameter, count)]
    lines += [*saved_by_recomputation(columns, run.central.name), *refusals]
    print("\n".join(lines))
    if largest is not None:
        print(_largest_line(modes, limit, largest))
    return binary.DONE


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """Shows progress over `count` modes on a terminal; yields a function to call with each next mode's name."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        shown, done = progress.add_task("", total=count), itertools.count()
        yield lambda name: progress.update(shown, completed=next(done), description=name)


def _configured() -> Devices:
    """Checks the flags together and configures the devices, as `launch.training`, which would join the cluster."""
    apply_recipe()
    check_belonging()
    _name_flags_of_runs()
    devices = devices_from_flags()
    resolve_precision(devices)
    return devices


def _name_flags_of_runs() -> None:
    """Says which flags on the command line change nothing here; one set of flags may be for launch.train too."""
    given = [f"--{flag.name}" for flag in FLAGS.get_flags_for_module("launch.flags.run") if flag.present]
    if given and not FLAGS.measure_here:
        binary.note(f"{', '.join(given)}: a step's memory does not depend on the run's length, files and reports")


def _placed(task: Task, devices: Devices, options: StepOptions) -> Devices:
    """The devices, with the parameters placed as in a run with these flags."""
    if not devices.automatic or FLAGS.strategy != TOWERS:
        return devices
    return build_strategy(TOWERS, task, devices, options).devices


def _largest(modes: ProcessModes, limit_bytes: int) -> int:
    mode = asked_mode(modes.devices)

    def needed(length: int) -> float:
        try:
            return modes.process_or_gpu(mode, length).total_bytes
        except BatchTooLarge:
            return math.inf

    return largest_batch(needed, limit_bytes, multiple=modes.multiple(mode))


def _largest_line(modes: ProcessModes, limit_bytes: int, largest: int) -> str:
    mode = asked_mode(modes.devices)
    where = f"{mode.name} in a process" if modes.devices.on_cpu else "a device"
    if largest:
        return f"the largest batch of {where} with {byte_text(limit_bytes)}: {largest}"
    smallest = modes.multiple(mode)
    needed = byte_text(modes.process_or_gpu(mode, smallest).total_bytes)
    return f"no batch of {where} fits {byte_text(limit_bytes)}: one of {smallest} needs {needed}"


def cli() -> None:
    """Console script."""
    binary.run(main, trains=False)


if __name__ == "__main__":
    cli()
