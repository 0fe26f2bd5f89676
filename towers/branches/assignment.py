"""Assigns a device to each branch of a block, so that the busiest device finishes as early as possible.

Branches are assigned in order of falling cost, each to the device with the least work (Graham 1969: at most 4/3 -
1/(3n) times the optimum). Branches that must not move are work of device 0. Blocks run one after another, so each
is balanced separately.

By default the cost is the number of parameters: measured costs may give another assignment after a resume, and
sums in another order would end a run with other bits.
"""

import dataclasses
from collections.abc import Callable, Sequence

from towers.branches.blocks import Block, Branch

# The cost of a whole branch.
Cost = Callable[[Branch], float]


@dataclasses.dataclass(frozen=True, eq=False)
class AssignedBlock:
    """A block with a device for each branch.

    Attributes:
      block: the block.
      costs: cost of each branch.
      devices: index of the device of each branch.
    """

    block: Block
    costs: tuple[float, ...]
    devices: tuple[int, ...]

    @property
    def largest(self) -> float:
        """The cost of the device with the most work."""
        return max(_loads(self.costs, self.devices))


def assigned(blocks: Sequence[Block], cost_of: Cost, num_devices: int) -> list[AssignedBlock]:
    """The blocks with their devices, in order.

    If a branch has blocks inside, either the outer block's branches or those of the inner blocks are divided over
    the devices, whichever finishes earlier.

    Args:
      blocks: blocks from `towers.branches.blocks.blocks_of`.
      cost_of: the cost of a branch.
      num_devices: number of devices.
    """
    held = [0.0] * num_devices
    return [_assigned(block, cost_of, held) for one in blocks for block in _chosen(one, cost_of, num_devices)[1]]


def _chosen(block: Block, cost_of: Cost, num_devices: int) -> tuple[float, list[Block]]:
    """The cost of a block, and the blocks to divide: itself, or those inside it."""
    outer = _assigned(block, cost_of, [0.0] * num_devices).largest
    inner, chosen = 0.0, []
    for branch in block.branches:
        inner += cost_of(branch)
        for one in branch.blocks:
            cost, found = _chosen(one, cost_of, num_devices)
            inner += cost - sum(map(cost_of, one.branches))
            chosen += found
    return (inner, chosen) if chosen and inner < outer else (outer, [block])


def _assigned(block: Block, cost_of: Cost, held: list[float]) -> AssignedBlock:
    """A block with its devices; of two devices with equal work the one with less in `held`. Adds to `held`."""
    costs = tuple(map(cost_of, block.branches))
    loads = [0.0] * len(held)
    devices = [0] * len(costs)
    # `sorted` keeps the order of equal costs; branches that must not move come first.
    for index in sorted(range(len(costs)), key=lambda index: (block.branches[index].moves, -costs[index])):
        if block.branches[index].moves:
            devices[index] = min(range(len(held)), key=lambda device: (loads[device], held[device], device))
        loads[devices[index]] += costs[index]
    for device, load in enumerate(loads):
        held[device] += load
    return AssignedBlock(block, costs, tuple(devices))


def _loads(costs: Sequence[float], devices: Sequence[int]) -> list[float]:
    loads = [0.0] * (max(devices) + 1)
    for cost, device in zip(costs, devices, strict=True):
        loads[device] += cost
    return loads
