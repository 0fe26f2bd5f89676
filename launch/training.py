"""All the flags of training, and what is built from them. A program of your own needs this one import:

from absl import app
from launch import training

def main(_):
    strategy = training.build_strategy(my_task)
    training.build_trainer(strategy).fit()

app.run(main)
"""

import sys
from collections.abc import Callable

from absl import app, flags

from launch import binary
from launch.flags.checks import numbers_from
from launch.flags.devices import devices_from_flags
from launch.flags.recipes import apply_recipe
from launch.flags.ring import joined_ring
from launch.flags.run import callbacks_from_flags, run_directory, trainer_options_from_flags
from launch.flags.saved import flag_settings
from launch.flags.servers import servers_place
from launch.flags.step import options_from_flags
from launch.membership.this_process import is_evaluator
from launch.supervision.fault import faults_from_environment
from launch.supervision.server_roles import follow_run, serve, work
from strategies import registry
from strategies.cluster import SERVER, WORKER
from strategies.contract import Strategy
from strategies.training.trainer import Trainer
from towers.options import StepOptions
from towers.task import Task, steps_per_epoch

FLAGS = flags.FLAGS


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
