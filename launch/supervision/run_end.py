"""The end of a training program: what it prints for a person, and its exit code."""

import pathlib
import sys
from collections.abc import Callable

from launch import binary
from strategies.reports.discarded_output import discarded_without_reader
from strategies.training.stop_signals import StopSignals
from strategies.training.trainer import FitResult


def reported_end(directory: pathlib.Path, *, keeps_files: bool) -> Callable[[FitResult, StopSignals], None]:
    """The function that a Trainer calls at the end. It prints the results, and exits if the run was stopped early.

    Args:
      directory: the run's directory.
      keeps_files: whether this process writes the run's files; the others print nothing.
    """

    def end(result: FitResult, signals: StopSignals) -> None:
        # Ctrl-C ends a `| tee` too. All is saved, so the exit code must not change.
        with discarded_without_reader(sys.stdout):
            if keeps_files:
                print_results(result)
            if keeps_files and not result.completed:
                print(f"{signals.name}: stopped at step {result.step}" + how_to_resume(result, directory))
            sys.stdout.flush()
        if result.completed:
            return
        signals.ignore_sigterm_afterwards()
        sys.exit(binary.INTERRUPTED)

    return end


def print_results(result: FitResult) -> None:
    """Prints the results of the run for a person."""
    if result.evaluation is not None:
        written = ", ".join(f"{name} {value:.4f}" for name, value in result.evaluation.items())
        print(f"step {result.evaluated_step}: evaluation {written}")
    if result.summary["images_per_second"]:
        print(f"speed: {result.summary['images_per_second']:,.0f} examples/s, steady median")
    skipped = result.summary["skipped_steps"]
    if skipped:
        print(f"skipped: {skipped:,} steps of this run were not finite and changed no parameter")
    straggler = result.summary["straggler"]
    if straggler is not None:
        times = straggler["times_the_others"]
        print(
            f"straggler: {straggler['name']} takes {times:.1f} times as long as the other workers, which wait "
            "for it"
        )
    for line in result.tables:
        print(line)
    for what, path in result.files.items():
        print(f"{what}: {path}")


def how_to_resume(result: FitResult, directory: pathlib.Path) -> str:
    """What to type to resume; empty for a dry run, which saves nothing."""
    if not result.files:
        return ""
    return f"; to resume, run the same command with --directory={directory.absolute()} --resume=auto"
