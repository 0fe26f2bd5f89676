"""What all workers of a ring do next, from what each of them wants to do."""

from collections.abc import Sequence

import numpy as np

from strategies.cluster import Member
from strategies.contract import Move
from towers.errors import UserError


def wish(move: Move) -> list[int]:
    """What a worker wants, as numbers."""
    return [move.stop, move.save, move.target, move.last_step, move.until]


def agreed(move: Move, wishes: np.ndarray, members: Sequence[Member]) -> Move:
    """Rank 0 decides when to save, the shortest call counts, and all stop if any was asked to stop.

    Args:
      move: what this worker wants.
      wishes: [workers, 5], the `wish` of each.
      members: the workers.

    Raises:
      UserError: they train to different steps.
    """
    stop, save, target, last_step, until = wishes.T
    for rank in np.flatnonzero(last_step != last_step[0]):
        raise UserError(
            f"{members[rank].name} trains to step {last_step[rank]}, and "
            f"{members[0].name} to step {last_step[0]}: start all workers with the same settings"
        )
    return Move(
        stop=bool(stop.any()),
        save=bool(save[0]),
        target=int(target.min()),
        last_step=move.last_step,
        until=int(until.min()),
    )
