"""The modes that the tests of GPUs try, on any two devices."""

import dataclasses
from collections.abc import Mapping

from strategies.contract import Strategy
from strategies.registry import build_strategy
from tests.strategies.small_task import small_task
from towers.devices import Devices
from towers.options import StepOptions
from towers.updates.rules import Adam
from towers.updates.schedules import Constant

# By mode: fields of `Devices`, of the step or of the task, or the strategy's name.
MODES: Mapping[str, Mapping[str, object]] = {
    "central": {},
    "parameters on the first device": {"parameters": 0},
    "replicated": {"parameters": 0, "replicated": True},
    "sharded": {"parameters": 0, "sharded": True},
    "zero=1": {"parameters": 0, "zero": 1},
    "zero=2": {"parameters": 0, "zero": 2},
    "zero=3": {"parameters": 0, "zero": 3},
    "offload": {"offload": "optimizer"},
    "synced": {"batch_stats": "synced"},
    "accumulation": {"accumulation": 2},
    "dropout": {"parameters": 0, "dropout": 0.2},
    "xla": {"parameters": 0, "dropout": 0.2, "xla": True},
    "mirrored": {"name": "mirrored"},
    "pipeline": {"name": "pipeline"},
    "slices": {"name": "slices"},
}


def strategy_of(mode: str, devices: Devices, precision: str = "float32", **given) -> Strategy:
    """The strategy of a mode on the towers of `devices`; the task has batch norm and augmentation.

    Args:
      mode: one of `MODES`.
      devices: the towers' devices.
      precision: precision of the step.
      **given: other arguments of `build_strategy`.
    """
    fields = dict(MODES[mode])
    options = StepOptions(rule=Adam(), schedule=Constant(0.01), seed=3, precision=precision)
    name = fields.pop("name", "towers")
    changed = {field: fields.pop(field) for field in ("batch_stats", "accumulation", "xla") if field in fields}
    task = small_task(augment=True, batch_norm=True, dropout=fields.pop("dropout", 0.0))
    if "parameters" in fields:
        fields["parameters"] = devices.towers[fields["parameters"]]
    placed = dataclasses.replace(devices, **fields)
    return build_strategy(name, task, placed, dataclasses.replace(options, **changed), **given)
