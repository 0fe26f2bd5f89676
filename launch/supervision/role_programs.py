"""Runs the processes that do not drive training: parameter servers, their workers, and evaluators."""

import contextlib
import pathlib

from launch import binary
from launch.messages.in_flags import in_flags
from launch.supervision.fault_injection import faults_from_environment
from launch.supervision.standstill_guard import StandstillGuard
from strategies.engines import TENSORFLOW
from strategies.parameter_servers import run_server, run_worker
from strategies.reports.metrics_log import MetricsLog
from strategies.reports.progress_display import ProgressDisplay
from strategies.reports.tensorboard_log import TensorBoardLog
from strategies.servers.membership import ServersMembership
from strategies.towers import towers_strategy
from strategies.training.checkpoint_evaluator import follow
from strategies.training.stop_signals import StopSignals
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task

_CODES = {"done": binary.DONE, "interrupted": binary.INTERRUPTED}


def serve(options: StepOptions, membership: ServersMembership) -> int:
    """Runs a server to its end; returns its exit code. After a signal the chief saves and ends the run."""
    with StopSignals() as signals, _ended_if_stopped(membership):
        code = _code_of(lambda: run_server(options, membership, stop_asked=signals.requested))
        if code == binary.INTERRUPTED:
            signals.ignore_sigterm_afterwards()
        return code


def work(task: Task, devices: Devices, options: StepOptions, membership: ServersMembership, *, shares) -> int:
    """Runs a worker to its end; returns its exit code."""
    faults = faults_from_environment()

    def before_step(step: int) -> None:
        for fault in faults:
            fault.before_steps(step)

    print(f"devices of this process: {devices.described}", flush=True)
    with StopSignals() as signals, _ended_if_stopped(membership):
        code = _code_of(
            lambda: run_worker(
                task,
                devices,
                options,
                membership,
                shares=shares,
                stop_asked=signals.requested,
                before_step=before_step,
            )
        )
        if code == binary.INTERRUPTED:
            signals.ignore_sigterm_afterwards()
        return code


def _ended_if_stopped(membership: ServersMembership):
    """Context manager: kills a stopped worker or server of TensorFlow's engine, whose chief waits for it.

    Our own servers give a stopped worker's steps to others and let it come back.
    """
    if membership.options.engine_choice().name != TENSORFLOW:
        return contextlib.nullcontext()
    seconds, name = membership.options.worker_timeout_seconds, membership.cluster.this.name
    why = f"{name} was stopped (SIGSTOP) for --worker_timeout_seconds={seconds:g}: killed, so that others notice"
    return StandstillGuard(seconds, why)


def follow_run(
    task: Task,
    devices: Devices,
    options: StepOptions,
    directory: pathlib.Path,
    *,
    shares,
    last_step: int | None,
) -> int:
    """Runs an evaluator to its end; returns its exit code. `last_step` is as for `follow`."""
    strategy = towers_strategy(task, devices, options, shares=shares)
    callbacks = [MetricsLog(), TensorBoardLog(), ProgressDisplay(worded=in_flags)]
    with StopSignals() as signals:
        try:
            is_over = follow(strategy, directory, callbacks, stop_requested=signals.requested, last_step=last_step)
        except UserError as error:
            return binary.fail(error)
        if not is_over:
            signals.ignore_sigterm_afterwards()
        return binary.DONE if is_over else binary.INTERRUPTED


def _code_of(run) -> int:
    try:
        return _CODES[run()]
    except binary.EXPECTED as error:
        return binary.fail(error)
