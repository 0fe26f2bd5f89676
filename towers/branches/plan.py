"""The plan of a model: which device of a tower computes each branch and holds its variables."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import keras

from towers.branches.assignment import AssignedBlock, assigned
from towers.branches.blocks import Branch, blocks_of
from towers.branches.options import BranchOptions
from towers.errors import UserError
from towers.layers.kernels import DEFAULT_KERNELS, LayerKernels
from towers.recompute.chain import functional_form
from towers.stages.model_stages import functional_of, nodes_of, variables_of
from towers.stages.operation_seconds import operation_seconds
from towers.stages.options import TIME

# Returns measured costs in whole nanoseconds.
Measure = Callable[[], Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class BranchPlan:
    """Where the branches are.

    Attributes:
      num_devices: devices of a tower.
      functionals: the models that have blocks: the model, and functional models inside it.
      blocks: their blocks.
      homes: by id of a node of a branch the index of its device; all other nodes are on device 0.
      is_measured: whether the blocks' costs are seconds; otherwise numbers of parameters.
    """

    num_devices: int
    functionals: tuple[keras.Model, ...]
    blocks: tuple[AssignedBlock, ...]
    homes: Mapping[int, int]
    is_measured: bool

    def devices_of(self, variables: Sequence[keras.Variable]) -> list[int]:
        """For each variable the index of the device that computes with it."""
        found = {
            id(variable): self.homes[id(node)]
            for functional in self.functionals
            for node in nodes_of(functional)
            if id(node) in self.homes
            for variable in variables_of(node.operation)
        }
        return [found.get(id(variable), 0) for variable in variables]


def plan_of(
    model: keras.Model,
    num_devices: int,
    options: BranchOptions,
    *,
    num_examples: int = 1,
    kernels: LayerKernels = DEFAULT_KERNELS,
    decided: Callable[[Measure], Sequence[int]] = lambda measure: measure(),
) -> BranchPlan:
    """The plan of a model.

    Args:
      model: a built template.
      num_devices: devices of a tower.
      options: how the cost of a branch is determined.
      num_examples: number of examples of a pass, for a measurement on the current device.
      kernels: which layers use other kernels than Keras's, for a measurement.
      decided: given a function that measures, returns its result, or that of the one process that measures for
        all.

    Raises:
      UserError: the model's code decides what it computes, it has no block, or no block has a branch for each
        device.
    """
    functionals, blocks, homes = [functional_of(model, "divided into branches")], [], {}
    for functional in functionals:
        costs = _costs(functional, options, num_examples, kernels, decided)

        def cost_of(branch: Branch, costs=costs) -> float:
            return sum(costs[id(node)] for node in branch.nodes)

        found = assigned(blocks_of(functional), cost_of, num_devices)
        blocks += found
        for one in found:
            for branch, device in zip(one.block.branches, one.devices, strict=True):
                homes |= {id(node): device for node in branch.nodes}
        for node in nodes_of(functional):
            inner = functional_form(node.operation)
            if inner is not None and id(node) not in homes and inner not in functionals:
                functionals.append(inner)
    _check_width(model, blocks, num_devices)
    return BranchPlan(num_devices, tuple(functionals), tuple(blocks), homes, options.balance == TIME)


def _costs(functional: keras.Model, options: BranchOptions, num_examples, kernels, decided) -> dict[int, float]:
    """The cost of each node, by id."""
    nodes = nodes_of(functional)
    if options.balance == TIME:

        def nanoseconds() -> list[int]:
            return [round(1e9 * seconds) for seconds in operation_seconds(functional, num_examples, kernels)]

        costs = [1e-9 * count for count in decided(nanoseconds)]
    else:
        costs = [
            float(sum(math.prod(v.shape) for v in variables_of(node.operation) if v.trainable)) for node in nodes
        ]
    return {id(node): cost for node, cost in zip(nodes, costs, strict=True)}


def _check_width(model: keras.Model, blocks: Sequence[AssignedBlock], num_devices: int) -> None:
    if not blocks:
        raise UserError(
            f"model {model.name!r} has no branches: these need a tensor that feeds two or more chains of layers, "
            "each with parameters of its own, and a layer that joins them, or several such inputs or heads; use "
            "towers of one device: strategy='towers', or a ring without a grid"
        )
    widest = max(one.block.num_moving for one in blocks)
    if num_devices > widest:
        raise UserError(
            f"{num_devices} devices a tower: the widest block of model {model.name!r} has {widest} branches with "
            f"parameters, so {num_devices - widest} would compute nothing; use {widest} devices a tower or less"
        )
