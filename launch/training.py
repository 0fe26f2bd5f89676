"""Defines all flags of training and builds a strategy and a Trainer from them. Your own program imports only this:

from launch import binary, training

def main(_):
    strategy = training.build_strategy(my_task)
    training.build_trainer(strategy).fit()

binary.run(main)

`launch.train` is these lines with a built-in task.

A program starts in this order. Each step reads the flags that the earlier ones have set:

    the command line     launch.binary.run
    a run's flags        only programs that read a run: launch.evaluate.load_run, by binary.run(after_parsing=)
    a recipe's flags     `_configure_at_start`, from here on
    checks               which flags have no effect with the others, or exclude them
    devices              TensorFlow permits no change after its first computation
    the cluster          TensorFlow's ring is joined before its first computation
    --precision=auto     may compute, to measure the precision's cost
    main                 task, strategy, Trainer

A flag has the value of the command line, or else of the recipe, of the run, or its default. `flag.present` means
"on the command line" throughout.
"""

import dataclasses
import sys
from collections.abc import Callable

from absl import app, flags

from launch import binary
from launch.flags.belonging import check_belonging
from launch.flags.branches import branches_from_flags
from launch.flags.checks import numbers_from
from launch.flags.devices import devices_from_flags
from launch.flags.pipeline import pipeline_from_flags
from launch.flags.precision import resolve_precision
from launch.flags.recipes import apply_recipe
from launch.flags.ring import joined_ring
from launch.flags.run import (
    callbacks_from_flags,
    check_timeline,
    known_directory,
    run_directory,
    run_length,
    trainer_options_from_flags,
)
from launch.flags.saved_flags import SavedFlags, flag_settings
from launch.flags.servers import servers_membership
from launch.flags.slices import slices_from_flags
from launch.flags.step import options_from_flags
from launch.membership.this_process import is_evaluator
from launch.supervision.fault_injection import faults_from_environment
from launch.supervision.role_programs import follow_run, serve, work
from launch.supervision.run_end import reported_end
from launch.supervision.verify_run import verify
from strategies import registry
from strategies.cluster import SERVER, WORKER
from strategies.contract import Strategy
from strategies.training.trainer import Trainer
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions, check_step_options
from towers.task import Task, check_task

FLAGS = flags.FLAGS


def _configure_at_start() -> None:
    """Configures devices and joins the cluster before `main`, whose first line may already use TensorFlow.

    The module's docstring says why in this order.
    """
    try:
        apply_recipe()
        check_belonging()
        check_timeline()
        devices = devices_from_flags()
        joined_ring()
        servers_membership()
        resolve_precision(devices)
    except binary.EXPECTED as error:
        sys.exit(binary.fail(error))


app.call_after_init(_configure_at_start)


def build_strategy(task: Task, options: StepOptions | None = None) -> Strategy:
    """The strategy of --strategy on this process's devices.

    Does not return in a parameter server, in a worker of parameter servers or in an evaluator: such a process does
    its work here and exits, because the rest of the program is for the processes that drive training. With
    --verify it compares the strategy with one device and exits; with --show_layout it prints the layout and exits.

    Args:
      task: what to train.
      options: how a step computes; None for the options of the flags.
    """
    check_task(task)
    devices, membership = devices_from_flags(), servers_membership()
    options = options or options_from_flags(run_length(task))
    check_step_options(options)
    if FLAGS.verify:
        # Where a strategy chooses XLA itself, XLA rounds the preparation of images (float32) unlike the reference.
        options = dataclasses.replace(options, precision=FLAGS.verify_precision, xla=bool(options.xla))
    shares = numbers_from("tower_shares")
    if membership is not None and membership.role == SERVER:
        sys.exit(serve(options, membership))
    if membership is not None and membership.role == WORKER:
        sys.exit(work(task, devices, options, membership, shares=shares))
    if is_evaluator():
        sys.exit(_follow_run(task, devices, options, shares=shares))
    strategy = registry.build_strategy(
        FLAGS.strategy,
        task,
        devices,
        options,
        shares=shares,
        ring=joined_ring(),
        servers=membership,
        pipeline=pipeline_from_flags(),
        slices=slices_from_flags(),
        branches=branches_from_flags(),
        steps_per_execution=FLAGS.steps_per_execution or None,
    )
    if FLAGS.show_layout:
        print(strategy.layout_table)
        sys.exit(binary.DONE)
    if FLAGS.verify:
        sys.exit(verify(task, strategy))
    return strategy


def _follow_run(task: Task, devices: Devices, options: StepOptions, *, shares) -> int:
    """Runs an evaluator to its end; returns its exit code.

    Raises:
      UserError: --directory, the run to evaluate, is missing.
    """
    directory = known_directory()
    if directory is None:
        raise UserError(
            "an evaluator without --directory would wait in a new folder, where no run saves: give it the "
            "--directory of the run"
        )
    if FLAGS.dry_run or FLAGS.verify:
        print("evaluator: this run saves no checkpoint, so there is nothing to evaluate", flush=True)
        return binary.DONE
    last_step = run_length(task) if FLAGS.resume == "auto" else None
    return follow_run(task, devices, options, directory, shares=shares, last_step=last_step)


def serve_if_server() -> None:
    """In a parameter server, serves until training ends and exits; in other processes, returns at once.

    `build_strategy` does the same, but needs a task: call this first so that servers need no data. (With --verify
    their options depend on the task.)
    """
    membership = servers_membership()
    if membership is not None and membership.role == SERVER and not FLAGS.verify:
        sys.exit(serve(options_from_flags(1), membership))


def build_trainer(strategy: Strategy, *, stop_requested: Callable[[], bool] | None = None) -> Trainer:
    """A Trainer, with a progress display, for the run that the flags describe.

    Its `fit` prints the results. SIGTERM, SIGHUP and Ctrl-C save, and end the program with exit code 75.

    Args:
      strategy: from `build_strategy`.
      stop_requested: called between steps; training saves and `fit` returns once it returns True. None: only
        these signals stop it.
    """
    files = (*callbacks_from_flags(), SavedFlags()) if strategy.keeps_files else ()
    return Trainer(
        strategy,
        trainer_options_from_flags(str(run_directory())),
        callbacks=[*files, *faults_from_environment()],
        stop_requested=stop_requested,
        ended=reported_end(run_directory(), keeps_files=strategy.keeps_files),
        settings=flag_settings(),
    )
