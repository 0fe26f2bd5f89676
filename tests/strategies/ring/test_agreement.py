"""What a ring's workers do next, decided from the wishes of all."""

import numpy as np

from strategies.cluster import WORKER, Member
from strategies.contract import Move
from strategies.ring.agreement import agreed, wish
from tests.towers.user_errors import refused

MEMBERS = (Member(WORKER, 0), Member(WORKER, 1))


def move(**changes) -> Move:
    wanted = {
        "stop": False,
        "save": False,
        "target": 3,
        "last_step": 20,
        "until": 9,
        "evaluation": 9,
        "checkpoint": 9,
    }
    return Move(**wanted | changes)


def decided(*moves: Move, save_together: bool = False) -> Move:
    return agreed(moves[-1], np.array([wish(each) for each in moves]), MEMBERS, save_together=save_together)


def test_the_shortest_call_counts_and_one_worker_stops_all():
    found = decided(move(target=5, until=7), move(stop=True))
    assert (found.stop, found.target, found.until) == (True, 3, 7)


def test_the_first_worker_decides_when_to_save():
    assert decided(move(save=True), move()).save
    assert not decided(move(), move(save=True)).save


def test_the_first_worker_decides_whether_to_evaluate():
    """Only the first worker has the run's files, which show what was evaluated."""
    assert decided(move(evaluate=True), move()).evaluate
    assert not decided(move(), move(evaluate=True)).evaluate


def test_workers_that_train_to_different_steps():
    with refused("worker:1 trains to step 10", "worker:0 trains to step 20"):
        decided(move(), move(last_step=10))


def test_workers_that_evaluate_at_different_steps():
    """Otherwise one would evaluate while the other trains, and to both it would look like a lost connection."""
    with refused("worker:1 evaluates at step 7", "worker:0 evaluates at step 9", "evaluate_every_steps"):
        decided(move(), move(evaluation=7))


def test_workers_that_save_together_at_different_steps():
    """With ZeRO workers save together; otherwise the first one saves alone, and the others need not know when."""
    decided(move(), move(checkpoint=5))
    with refused("worker:1 saves at step 5", "worker:0 saves at step 9", "checkpoint_every_steps"):
        decided(move(), move(checkpoint=5), save_together=True)
