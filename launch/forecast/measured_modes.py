"""The measured peak of the modes that one process can run, each in a fresh process."""

import sys
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
from absl import flags

from launch.flags.belonging import unserved
from launch.flags.grid import divided_by
from launch.forecast.columns import Column
from launch.forecast.modes_of_a_process import AXES, PIPELINE, SLICES, ProcessMode, ProcessModes, all_devices
from launch.measuring.allocation_trace import USE_TRACED_ALLOCATOR, allocated_peak
from launch.measuring.case import Case, Work
from launch.measuring.running import run_case
from launch.supervision.own_program import own_program
from strategies.data_checks.batches import as_batches
from strategies.training.stop_signals import StopSignals
from towers.engine import Engine
from towers.task import InputShard, Task

FLAGS = flags.FLAGS
# Keys of what a process prints: bytes that a step itself allocates, or all bytes of the fullest GPU.
PASSING, FULLEST = "passing_bytes", "fullest_gpu_bytes"
_TIMEOUT_SECONDS = 900.0
# Flags that choose a mode, and would contradict the measured one.
_OF_MODES = ("strategy", "num_towers", "grid", "slices", "parameter_device", "zero", "offload", "branch_devices")
# Flags that only one mode accepts.
_OF_ONE_MODE = {SLICES: ("layout",), PIPELINE: ("stages", "microbatches", "pipeline_schedule")}


def measured(
    modes: ProcessModes, columns: Sequence[Column], show: Callable[[str], None] = lambda mode: None
) -> dict[str, float]:
    """The measured peak in bytes of each column's mode, by the column's name.

    The peak is that of the whole process if its towers are on CPUs, else that of the fullest GPU.

    Args:
      modes: the modes of one process.
      columns: the columns to measure; each has a `mode`.
      show: called with the name of each before it runs, which may take a minute.

    Raises:
      PeerLost, UserError, Interrupted: see `launch.measuring.running.run_case`.
    """
    found = {}
    with StopSignals() as signals:
        for column in columns:
            show(column.name)
            figures = run_case(
                _case(modes, column.mode), timeout_seconds=_TIMEOUT_SECONDS, is_interrupted=signals.requested
            )
            passing = modes.memory(column.mode).passing_bytes(modes.task.batch_size)
            found[column.name] = _of_process(column, figures, passing)
    return found


def _of_process(column: Column, figures: Mapping[str, float], passing_bytes: int) -> float:
    """Predicted bytes that a process holds before a step (they are exact), + the measured ones of the step."""
    if column.process is None:
        return figures[FULLEST]
    return column.process.total_bytes - passing_bytes + figures[PASSING]


def _case(modes: ProcessModes, mode: ProcessMode) -> Case:
    of_others = [name for one, names in _OF_ONE_MODE.items() if one != mode.strategy for name in names]
    of_others += unserved("strategy", mode.strategy)
    # Pipelines and branches accept it. The prediction used it only if the flags choose this mode.
    of_others += ["balance"] * (AXES.get(mode.strategy) != divided_by())
    of_others += ["tower_shares"] * (modes.shares(mode) is None)
    words = [
        word for word in _without(sys.argv[1:], *_OF_MODES, *of_others) if word not in ("--json", "--measure")
    ]
    command, variables = own_program("launch.memory", *words, "--measure_here", *mode.flags(modes.devices))
    work = Work("towers", mode.num_devices, "", modes.task.batch_size)
    return Case(mode.name, work, command, variables={**variables, **USE_TRACED_ALLOCATOR})


def _without(words: Sequence[str], *names: str) -> list[str]:
    """The command line without these flags, whose values follow a '=' or are the next word."""
    found, skips = [], False
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=")
        is_named = word.startswith("-") and name in names
        if not (is_named or skips):
            found.append(word)
        skips = is_named and not equals and not FLAGS[name].boolean
    return found


def measure_here(engine: Engine, task: Task, num_steps: int) -> dict[str, float]:
    """Runs steps on one batch in this process, and measures the memory of all but the first one.

    Args:
      engine: the engine of the mode.
      task: the task that gives the batch.
      num_steps: number of steps; if it is 1, that step is measured.

    Returns:
      The largest peak in bytes, as PASSING or FULLEST: peaks differ, as threads vary the order of operations.
    """
    if engine.devices.on_cpu:
        return {PASSING: max(passing_of_steps(engine, task, num_steps))}
    for one in _steps(engine, task, num_steps):
        one()
    gpus = [tower.removeprefix("/device:") for tower in all_devices(engine.devices)]
    return {FULLEST: max(tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus)}


def passing_of_steps(engine: Engine, task: Task, num_steps: int) -> list[float]:
    """The peak in bytes of each step's own allocations on CPUs, for the steps that `measure_here` measures."""
    return [allocated_peak(one) for one in _steps(engine, task, num_steps)]


def _steps(engine: Engine, task: Task, num_steps: int) -> list[Callable[[], float]]:
    """Functions that run one step each. If `num_steps` is above 1, a first step has already run."""
    batch = next(iter(as_batches(task.dataset("train", InputShard()))))

    def step():
        return float(engine.train(batch, engine.options.rate(0)).loss_sum)

    if num_steps > 1:
        step()
    return [step] * max(1, num_steps - 1)
