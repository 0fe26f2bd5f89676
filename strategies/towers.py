"""The strategy 'towers': towers on the devices of one process, parameters on one or all of these devices."""

import dataclasses
import functools
import math
from collections.abc import Callable

import keras
import tensorflow as tf
from tensorflow.python.framework import config  # whether operations are deterministic has no public name

from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.errors import UserError, is_integer
from towers.gathering.gathered_once import GatheredOnce
from towers.input.tower_parts import TowerParts
from towers.one_process_engine import OneProcessEngine, reads_rows
from towers.options import StepOptions
from towers.parameters.automatic_device import chosen_device
from towers.task import Batch, Task
from towers.together.traced_together import TracedTogether
from towers.tower import ModelVariables
from towers.tracing.traced_once import TracedOnce
from towers.xla_choice import xla_choice


def towers_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    parts: TowerParts | None = None,
    steps_per_execution: int | None = None,
) -> SynchronousStrategy:
    """Builds the strategy 'towers'.

    Args:
      task, devices, options, shares, steps_per_execution: as for `strategies.registry.build_strategy`.
      parts: how a batch is cut for the towers; None to cut it by their shares.

    Raises:
      UserError: shares don't match the towers, the batch is too small for all towers, or an option does not allow
        several steps in an execution.
    """
    alone = _why_alone(devices, options)
    if steps_per_execution is not None:
        _check_count(steps_per_execution, alone)

    def make_engine(model, batch_spec):
        choice = xla_choice(task, model, devices, options, batch_spec)
        own = dataclasses.replace(options, xla=choice.compiles)
        return OneProcessEngine(
            task,
            model,
            _placed(devices, model, batch_spec, own),
            own,
            batch_spec=batch_spec,
            parts=parts or TowerParts.of_one_process(devices.num_towers, shares),
            why_not_xla=choice.why_not,
            traced=_traced(devices, options),
        )

    return SynchronousStrategy(
        "towers",
        task,
        options,
        make_engine,
        devices.num_towers,
        unprepared=devices.input_on_towers,
        # On GPUs several steps were never measured.
        steps_per_execution=1 if alone else steps_per_execution or (None if devices.on_cpu else 1),
    )


def _traced(devices: Devices, options: StepOptions) -> Callable:
    """The function that makes the towers' graphs."""
    if devices.zero == 3:
        return GatheredOnce
    if _exchanges(devices, options) and devices.on_cpu:
        return functools.partial(TracedTogether, devices=devices.towers)
    # Between GPUs NCCL computes the sums.
    return TracedOnce


def _exchanges(devices: Devices, options: StepOptions) -> bool:
    """Whether a tower's pass exchanges sums with other towers."""
    return options.batch_stats == "synced" and devices.num_towers > 1


def _check_count(steps_per_execution: object, alone: str) -> None:
    """Raises UserError for an invalid number of steps in an execution, or for several if `alone` forbids it."""
    given = f"steps_per_execution={steps_per_execution!r}"
    if not is_integer(steps_per_execution) or steps_per_execution < 1:
        raise UserError(f"{given}: must be an integer of at least 1; use for example 32, or omit it")
    if alone and steps_per_execution > 1:
        raise UserError(f"{given} with {alone}; omit one of them")


def _why_alone(devices: Devices, options: StepOptions) -> str:
    """The option that does not allow several steps in an execution, and the reason; '' if all allow it."""
    if options.accumulation > 1:
        return f"accumulation={options.accumulation}: each microbatch is an execution"
    if config.is_op_determinism_enabled():
        return "deterministic=True: a graph can't read the clock then"
    if _exchanges(devices, options) and not devices.on_cpu:
        return "batch_stats='synced': a graph can't repeat an exchange of several GPUs"
    return ""


def _placed(devices: Devices, model: keras.Model, batch_spec: Batch, options: StepOptions) -> Devices:
    """The devices, with the best parameter device for this model if the user left it open."""
    if not devices.automatic:
        return devices
    variables = ModelVariables.of(model).parameters
    parameter_bytes = sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)
    memory = [gpu.memory_bytes for gpu in devices.gpus]
    chosen = chosen_device(
        num_gpus=devices.num_towers,
        parameter_bytes=parameter_bytes,
        slot_bytes=parameter_bytes * len(options.rule.slot_names),
        gpu_bytes=None if None in memory or not memory else min(memory),
        reads_rows=reads_rows(model, batch_spec, options),
    )
    return devices.placed(chosen.device, chosen.reason)
