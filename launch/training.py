"""All the flags of training, and what is built from them. A program of your own needs this one import:

from absl import app
from launch import training

def main(_):
    strategy = training.build_strategy(my_task)
    training.build_trainer(strategy).fit()

app.run(main)
"""

import datetime
import os
import pathlib
import sys
from collections.abc import Callable, Mapping

from absl import app, flags

from launch import binary
from launch.flags.checks import numbers_from
from launch.flags.devices import devices_from_flags
from launch.flags.recipes import apply_recipe
from launch.flags.ring import joined_ring
from launch.flags.run import callbacks_from_flags, trainer_options_from_flags
from launch.flags.servers import servers_place
from launch.flags.step import options_from_flags
from launch.membership.this_process import is_evaluator
from launch.supervision.fault import faults_from_environment
from launch.supervision.server_roles import follow_run, serve, work
from strategies import registry
from strategies.cluster import SERVER, WORKER
from strategies.contract import Strategy
from strategies.training.trainer import Trainer
from strategies.whole_file import write_whole
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task, steps_per_epoch

FLAGS = flags.FLAGS
FLAG_FILE = "flags.txt"
RUN_DIRECTORY_VARIABLE = "TOWERS_RUN_DIRECTORY"


def _configure_at_start() -> None:
    """Devices and servers are made before the first tensor, and a program's main may begin with its data."""
    try:
        apply_recipe()
        devices_from_flags()
        joined_ring()
        servers_place()
    except binary.EXPECTED as error:
        sys.exit(binary.fail(error))


app.call_after_init(_configure_at_start)


def build_strategy(task: Task, options: StepOptions | None = None) -> Strategy:
    """The strategy of --strategy on this process's devices.

    In a process that serves or computes for the chief of parameter servers, or evaluates beside the others, it
    does that and then ends the process: what the program does with a strategy is not theirs.

    Args:
      task: what is trained.
      options: how a step computes; None for what the flags say.
    """
    devices, place = devices_from_flags(), servers_place()
    options = options or options_from_flags(run_length(task))
    shares = numbers_from("tower_shares")
    if place is not None and place.role == SERVER:
        sys.exit(serve(options, place))
    if place is not None and place.role == WORKER:
        sys.exit(work(task, devices, options, place, shares=shares))
    if is_evaluator():
        sys.exit(follow_run(task, devices, options, run_directory(), shares=shares))
    return registry.build_strategy(
        FLAGS.strategy, task, devices, options, shares=shares, ring=joined_ring(), servers=place
    )


def serve_if_server() -> None:
    """Ends a parameter server's process after its work; a program may call it before it looks for data."""
    place = servers_place()
    if place is not None and place.role == SERVER:
        sys.exit(serve(options_from_flags(1), place))


def build_trainer(strategy: Strategy, *, stop_requested: Callable[[], bool] = lambda: False) -> Trainer:
    """A Trainer of the run that the flags describe, with a display."""
    return Trainer(
        strategy,
        trainer_options_from_flags(str(run_directory())),
        callbacks=[*(callbacks_from_flags() if strategy.keeps_files else ()), *faults_from_environment()],
        stop_requested=stop_requested,
        settings=flag_settings(),
    )


def run_length(task: Task) -> int:
    """Steps of the whole run, for the schedule."""
    return trainer_options_from_flags(None).num_steps(steps_per_epoch(task))


def run_directory() -> pathlib.Path:
    """--directory, or a new one named for the time; the same at every call in a process.

    A launcher names one for all the processes that it starts: without --directory, TOWERS_RUN_DIRECTORY counts.
    """
    if FLAGS.directory is None:
        FLAGS.directory = os.environ.get(RUN_DIRECTORY_VARIABLE) or None
    if FLAGS.directory is None:
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        FLAGS.directory = os.path.join("runs", f"{started}-{os.getpid()}")
    return pathlib.Path(FLAGS.directory)


def flag_settings() -> Mapping[str, object]:
    """The flags of this package and their values, by name."""
    return {
        flag.name: flag.value
        for module, of_module in FLAGS.flags_by_module_dict().items()
        if module.startswith("launch.")
        for flag in of_module
    }


def save_flags(directory: pathlib.Path) -> None:
    """Writes the flags of this run for `launch.evaluate` and `launch.export` to read."""
    lines = []
    for name, value in flag_settings().items():
        if value is not None and value != [] and name not in _NOT_KEPT:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"--{name}={text}\n")
    write_whole(directory / FLAG_FILE, "".join(lines))


# What is true of one call and not of the run.
_NOT_KEPT = (
    "directory",
    "resume",
    "dry_run",
    "verify",
    "verify_precision",
    "verify_tolerance",
    "profile_steps",
)


def load_flags(directory: str | None) -> None:
    """Takes over the flags of the run in `directory`, but for those given on the command line.

    Raises:
      UserError: no directory, or none that a run was kept in.
    """
    if directory is None:
        raise UserError("--directory is missing: name the directory of a run")
    path = pathlib.Path(directory) / FLAG_FILE
    if not path.exists():
        raise UserError(
            f"--directory={directory}: no run was kept there (it has no {FLAG_FILE}); name one that was"
        )
    given = {name for name in FLAGS if FLAGS[name].present}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.removeprefix("--").partition("=")
        if name in FLAGS and name not in given:
            FLAGS[name].parse(value)
