"""Rings of one worker: a process may train several, one after another."""

from keras import layers

from strategies.registry import build_strategy
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import (
    NUM_CLASSES,
    TinyTask,
    assert_close,
    parameters_of,
    stacked,
    trainer_of,
    vectors,
)
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.updates.schedules import Constant


def task_of_width(width: int) -> TinyTask:
    def build():
        return stacked(
            (4,), layers.Dense(width, use_bias=False), layers.BatchNormalization(), layers.Dense(NUM_CLASSES)
        )

    return TinyTask(build=build, examples=vectors(8))


def test_each_sums_its_own_statistics():
    """TensorFlow remembers the length of each sum by the keys of group and sum, so rings need different keys."""
    for width in (5, 6):
        options = StepOptions(batch_stats="synced", schedule=Constant(0.1))
        ring = build_strategy("ring", task_of_width(width), cpus(2), options)
        alone = trainer_of(task_of_width(width), 1)
        for strategy in (ring, alone):
            strategy.run_steps(2)
        assert_close(parameters_of(ring), parameters_of(alone))


def test_a_share_too_small_for_the_batch_is_named_as_given():
    """The ring scales shares, so that workers with other sums get their parts."""
    with refused("tower_shares=50,50,1: a tower gets no example of a batch of 8"):
        build_strategy("ring", task_of_width(5), cpus(3), StepOptions(), shares=(50, 50, 1))
