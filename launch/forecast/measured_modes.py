"""The measured peak of the modes that one process can run, each in a fresh process."""

import itertools
import sys
from collections.abc import Mapping, Sequence

import tensorflow as tf

from launch.forecast.columns import GRAPH, Column, Run
from launch.measuring.allocation_trace import USE_TRACED_ALLOCATOR, allocated_peak
from launch.measuring.case import Case, Work
from launch.measuring.running import run_case
from launch.supervision.own_program import own_program
from strategies.synchronous import as_batches
from strategies.training.stop_signals import StopSignals
from towers.devices import SHARDED
from towers.task import InputShard

# What a process prints: bytes that a step allocates beside what it holds, or all bytes of the fullest GPU.
PASSING, FULLEST = "passing_bytes", "fullest_gpu_bytes"
_TIMEOUT_SECONDS = 900.0


def measured(run: Run, columns: Sequence[Column]) -> dict[str, float]:
    """The measured peak in bytes of each mode that one process can run, by the column's name.

    It is that of the process if its towers are on CPUs, else that of the fullest GPU.

    Raises:
      PeerLost, UserError, Interrupted: as `launch.measuring.running.run_case`.
    """
    ways = {"1 tower": (1, False)}
    ways[f"{run.num_towers} towers"] = (run.num_towers, False)
    ways[f"{run.num_towers} towers, sharded"] = (run.num_towers, True)
    found = {}
    with StopSignals() as signals:
        for column in columns:
            if column.basis == GRAPH and column.name in ways:
                num_towers, sharded = ways[column.name]
                figures = run_case(
                    _case(run, column.name, num_towers, sharded=sharded),
                    timeout_seconds=_TIMEOUT_SECONDS,
                    is_interrupted=signals.requested,
                )
                passing = run.memory(num_towers, sharded=sharded).passing_bytes(run.task.batch_size)
                found[column.name] = _of_process(column, figures, passing)
    return found


def _of_process(column: Column, figures: Mapping[str, float], passing_bytes: int) -> float:
    """What the process holds before a step is known to the byte: the step's own allocations are added to it."""
    if column.process is None:
        return figures[FULLEST]
    return column.process.total_bytes - passing_bytes + figures[PASSING]


def _case(run: Run, name: str, num_towers: int, *, sharded: bool) -> Case:
    # Of a flag that is given twice, the last counts.
    words = [word for word in sys.argv[1:] if word not in ("--json", "--measure")]
    here = ["--measure_here", f"--num_towers={num_towers}"]
    here += [f"--parameter_device={SHARDED}"] if sharded else ["--parameter_device=cpu"]
    command, variables = own_program("launch.memory", *words, *here)
    work = Work("towers", num_towers, "", run.task.batch_size)
    return Case(name, work, command, variables={**variables, **USE_TRACED_ALLOCATOR})


def measure_here(run: Run, num_steps: int) -> dict[str, float]:
    """Runs steps on one batch in this process, and measures the last one's memory.

    Args:
      run: with the towers of the mode.
      num_steps: number of steps.
    """
    engine = run.strategy(run.num_towers, sharded=run.devices.sharded).engine
    batch = next(iter(as_batches(run.task.dataset("train", InputShard()))))

    def step():
        return float(engine.train(batch, run.options.schedule(0)).loss_sum)

    for _ in itertools.repeat(None, num_steps - 1):
        step()
    if run.devices.on_cpu:
        return {PASSING: allocated_peak(step)}
    step()
    gpus = [tower.removeprefix("/device:") for tower in run.devices.towers]
    return {FULLEST: max(tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus)}
