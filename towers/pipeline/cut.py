"""Where a chain of layers is cut into stages: by costs, minimizing the largest stage, or by given sizes.

A cut is a list of boundaries b, as in `split`: stage i has the layers b[i] to b[i + 1] - 1.

    costs 3 1 1 5 2 into 3 stages:   [3 1 1] [5] [2]   boundaries [0, 3, 4, 5]
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence

from towers.errors import UserError


def balanced_boundaries(costs: Sequence[float], num_stages: int) -> list[int]:
    """[stages + 1] the boundaries of the cut that minimizes the largest stage.

    Exact, by dynamic programming in O(stages * layers^2). Among the cuts with that largest stage it takes the one
    with the smallest sum of squares, so that the other stages are balanced too.

    Args:
      costs: [layers] seconds, parameters or bytes of each layer, none negative.
      num_stages: number of stages; each gets at least one layer.

    Raises:
      UserError: there are fewer layers than stages.
    """
    if not 1 <= num_stages <= len(costs):
        raise UserError(
            f"{num_stages} stages for {len(costs)} operation{'' if len(costs) == 1 else 's'}: each stage has at "
            f"least one; use at most stages={len(costs)}"
        )
    assert all(cost >= 0 and math.isfinite(cost) for cost in costs), f"costs {costs}"
    ends = [0, *itertools.accumulate(costs)]

    def load(first: int, end: int) -> float:
        return ends[end] - ends[first]

    def square(first: int, end: int) -> float:
        # In units of the largest stage, so that squares of large costs stay finite.
        return (load(first, end) / (smallest or 1.0)) ** 2 if load(first, end) <= smallest else math.inf

    smallest, _ = _best_cut(len(costs), num_stages, load, max)
    return _best_cut(len(costs), num_stages, square, operator.add)[1]


def sized_boundaries(sizes: Sequence[int], num_layers: int) -> list[int]:
    """[stages + 1] the boundaries of stages with these numbers of layers.

    Raises:
      UserError: a size is below 1, or the sizes do not add up to `num_layers`.
    """
    written = ",".join(map(str, sizes))
    if not sizes or min(sizes) < 1:
        raise UserError(f"balance={written}: every stage has at least one operation; give one size for each stage")
    if sum(sizes) != num_layers:
        raise UserError(
            f"balance={written}: the sizes add up to {sum(sizes)}, the model has {num_layers} operations; "
            "give sizes that add up to that"
        )
    return [0, *itertools.accumulate(sizes)]


def _best_cut(
    num_layers: int, num_stages: int, cost: Callable[[int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The smallest joined cost of `num_stages` stages over all cuts, and the boundaries of a cut that has it.

    `cost` must not fall when a stage gets another layer, and `joined` must be at least as large as its arguments.
    best[end] is (joined cost, boundaries) of the layers before `end` in the stages so far.
    """
    best = {end: (cost(0, end), [0, end]) for end in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        longer = {}
        for end in range(stage + 1, num_layers + 1):
            chosen, lowest = end - 1, math.inf
            for first in range(end - 1, stage - 1, -1):
                last_cost = cost(first, end)
                if last_cost > lowest:
                    break
                total = joined(best[first][0], last_cost)
                if total < lowest:
                    chosen, lowest = first, total
            longer[end] = (lowest, [*best[chosen][1], end])
        best = longer
    return best[num_layers]
