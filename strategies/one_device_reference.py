"""The reference that a strategy is verified against: the same training on one device."""

import dataclasses

from strategies.contract import Strategy
from strategies.synchronous import SynchronousStrategy
from strategies.towers import towers_strategy
from towers.devices import Devices
from towers.errors import UserError
from towers.input.tower_parts import PartsOfWorkers
from towers.layers.batch_norm.calls import batch_norm_layers
from towers.options import StepOptions
from towers.task import Task
from towers.tower import ModelVariables

_ONE_DEVICE = "/device:CPU:0"


def reference_strategy(task: Task, strategy: SynchronousStrategy, options: StepOptions) -> tuple[Strategy, str]:
    """The same training on one device, and a text for the user: how that device divides each batch.

    An example's gradient can depend on its part of the batch: on the part's other examples (batch statistics that
    are not synced) or on the part's random numbers (dropout). In both cases the device computes the strategy's
    parts one after another; otherwise it computes each batch undivided.

    Raises:
      UserError: the strategy is asynchronous, or the model has dropout and synced batch statistics, which one
        device can't reproduce.
    """
    if not strategy.is_exact:
        raise UserError(
            "verify with asynchronous updates: the result depends on which worker is first; "
            "use staleness='sync' or staleness=0"
        )
    model = strategy.model
    coupled = bool(batch_norm_layers(model)) and options.batch_stats != "synced"
    random = bool(ModelVariables.of(model).seeds)
    if random and options.batch_stats == "synced" and batch_norm_layers(model):
        raise UserError(
            "verify with batch_stats='synced' and dropout: each tower draws its own dropout masks, which one "
            "device can't reproduce; verify with batch_stats='average'"
        )
    count = strategy.num_towers if coupled or random else 1
    devices = Devices(towers=(_ONE_DEVICE,) * count, parameters=_ONE_DEVICE)
    parts = PartsOfWorkers.of(strategy.shares_by_worker) if count > 1 else None
    how = "undivided" if count == 1 else f"in the same {count} parts, one after another"
    if strategy.microbatches > 1:
        how += f", {strategy.microbatches} microbatches"
    # The reference runs without XLA, so that the comparison also tests XLA.
    plain = dataclasses.replace(options, xla=False, accumulation=strategy.microbatches)
    reference = towers_strategy(task, devices, plain, parts=parts)
    return reference, f"one device, each batch {how}"
