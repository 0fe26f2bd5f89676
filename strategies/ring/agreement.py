"""What all workers of a ring do next, from what each of them wants to do."""

from collections.abc import Sequence

import numpy as np

from strategies.cluster import Member
from strategies.contract import Move
from towers.errors import UserError


def wish(move: Move) -> list[int]:
    """A worker's wanted move as numbers: [8]."""
    asked = [move.stop, move.save, move.evaluate]
    return [*asked, move.target, move.last_step, move.until, move.evaluation, move.checkpoint]


def agreed(move: Move, wishes: np.ndarray, members: Sequence[Member], *, save_together: bool) -> Move:
    """The common move: rank 0 decides when to save and evaluate, the shortest call counts, one stop stops all.

    Args:
      move: what this worker wants.
      wishes: [workers, 8], the `wish` of each.
      members: the workers.
      save_together: whether all workers take part in saving; otherwise only rank 0's period of saving matters.

    Raises:
      UserError: the workers train to different steps, or evaluate or save together at different steps.
    """
    stop, save, evaluate, target, last_step, until, evaluation, checkpoint = wishes.T
    _check_same("trains to step", last_step, members, "settings")
    _check_same("evaluates at step", evaluation, members, "evaluate_every_steps and evaluate_every_epochs")
    if save_together:
        _check_same("saves at step", checkpoint, members, "checkpoint_every_steps")
    return Move(
        stop=bool(stop.any()),
        save=bool(save[0]),
        evaluate=bool(evaluate[0]),
        target=int(target.min()),
        last_step=move.last_step,
        until=int(until.min()),
        evaluation=move.evaluation,
        checkpoint=move.checkpoint,
    )


def _check_same(what: str, steps: np.ndarray, members: Sequence[Member], settings: str) -> None:
    """Raises UserError if the steps at which the workers do something differ."""
    for rank in np.flatnonzero(steps != steps[0]):
        raise UserError(
            f"{members[rank].name} {what} {steps[rank]}, and {members[0].name} {what} {steps[0]}: "
            f"start all workers with the same {settings}"
        )
