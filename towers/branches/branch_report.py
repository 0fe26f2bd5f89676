"""The plan of a model's branches for the user: a line for each block, and a table of all branches."""

import math
from collections.abc import Sequence

import tensorflow as tf

from towers.branches.assignment import AssignedBlock
from towers.branches.blocks import Branch
from towers.branches.plan import BranchPlan
from towers.stages.model_stages import variables_of

# Largest number of blocks that are listed at the start of a run.
_MOST_BLOCKS = 10
_COLUMNS = ("joined by", "branch", "operations", "device", "bytes of parameters")


def plan_lines(plan: BranchPlan, devices: Sequence[str]) -> list[str]:
    """What each device computes, by block.

    Args:
      plan: plan of the model.
      devices: devices of the first tower.
    """
    names = _names(devices)
    alone, divided = (sum(sum(one.costs) for one in plan.blocks), sum(one.largest for one in plan.blocks))
    count = f"{len(plan.blocks)} block{'s' if len(plan.blocks) > 1 else ''}"
    if plan.is_measured:
        balance = f"{divided * 1e3:.3g} ms instead of {alone * 1e3:.3g} ms on one device, transfers not counted"
    else:
        balance = f"the fullest device of a block has {divided / alone:.0%} of its parameters on average"
    lines = [f"branches of {count} on {len(devices)} devices, everything else on {names[0]}; {balance}"]
    if len(plan.blocks) > _MOST_BLOCKS:
        return [*lines, "show_layout=True lists them"]
    return lines + [f"joined by {one.block.join}: {_by_device(one, names)}" for one in plan.blocks]


def plan_table(plan: BranchPlan, devices: Sequence[str]) -> str:
    """A line for each branch, with its cost.

    Args:
      plan: plan of the model.
      devices: devices of the first tower.
    """
    names = _names(devices)
    columns = (*_COLUMNS, "milliseconds") if plan.is_measured else _COLUMNS
    rows = []
    for one in plan.blocks:
        for branch, cost, device in zip(one.block.branches, one.costs, one.devices, strict=True):
            measured = (f"{cost * 1e3:.3g}",) if plan.is_measured else ()
            count, size = f"{len(branch.nodes)}", f"{_parameter_bytes(branch):,}"
            rows.append((one.block.join, branch.name, count, names[device], size, *measured))
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [columns, *rows]
    )


def _by_device(one: AssignedBlock, names: Sequence[str]) -> str:
    found = []
    for device, name in enumerate(names):
        own = [branch.name for branch, home in zip(one.block.branches, one.devices, strict=True) if home == device]
        found += [f"{name} {', '.join(own)}"] if own else []
    return "; ".join(found)


def _parameter_bytes(branch: Branch) -> int:
    variables = {id(v): v for node in branch.nodes for v in variables_of(node.operation) if v.trainable}
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables.values())


def _names(devices: Sequence[str]) -> list[str]:
    return [device.rpartition("device:")[2] for device in devices]
