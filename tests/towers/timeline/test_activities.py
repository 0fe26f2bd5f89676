"""The activity to which an operation belongs, by its name in the graph that ran."""

import pytest

from towers.pipeline.action import Action, Kind
from towers.timeline.activities import Activity, Work, activity_of

B13 = Action(Kind.BACKWARD, 1, 3)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("tower_1/PartitionedCall/dense/MatMul", Activity(Work.FORWARD, 1)),
        ("tower_1/PartitionedCall/gradient_tape/dense/MatMul/MatMul", Activity(Work.BACKWARD, 1)),
        ("tower_1/PartitionedCall/backward_pass/AddN_2", Activity(Work.BACKWARD, 1)),
        ("tower_0/PartitionedCall/dense/Relu_recomputed", Activity(Work.RECOMPUTED, 0)),
        ("replica_1/tower_0_1/StatefulPartitionedCall/conv/Conv2D", Activity(Work.FORWARD, 0)),
        ("tower_0/action_1B3/PartitionedCall/gradient_tape/dense/MatMul", Activity(Work.BACKWARD, 0, B13)),
        ("tower_0/exchange_12/AddN", Activity(Work.EXCHANGE)),
        ("update_1/update/ResourceApplyKerasMomentum", Activity(Work.UPDATE)),
        ("strided_slice_5", Activity(Work.OTHER)),
    ],
)
def test_activities(name, expected):
    assert activity_of(name) == expected
