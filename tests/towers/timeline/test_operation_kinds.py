"""The kinds of operations in a profile: types by TensorFlow's and oneDNN's names, and shares of the time."""

import pytest

from towers.timeline.operation_kinds import OTHER, kind_of, shares_by_kind
from towers.timeline.operations import TracedOperation


@pytest.mark.parametrize(
    "operation_type, kind",
    [
        ("_MklNativeConv2D", "convolutions, forward"),
        ("Conv2DBackpropInput", "convolutions, gradients of inputs"),
        ("_MklNativeConv2DBackpropFilter", "convolutions, gradients of kernels"),
        ("_MklNativeFusedBatchNormV3", "batch norm, forward"),
        ("FusedBatchNormGradV3", "batch norm, gradients"),
        ("MaxPoolGrad", "pooling"),
        ("ReluGrad", "ReLU"),
        ("_MklNativeAddV2", "additions"),
        ("AddN", "additions"),
        ("ResourceApplyKerasMomentum", "updates of parameters"),
        ("Softmax", OTHER),
    ],
)
def test_a_kind_is_found_under_each_of_its_names(operation_type, kind):
    assert kind_of(operation_type) == kind


def test_shares_are_of_the_time_of_all_that_computes_and_the_largest_is_first():
    operations = [
        TracedOperation(0.0, 1.0, "a", "CPU:0", operation_type="Relu"),
        TracedOperation(0.0, 2.0, "b", "CPU:1", operation_type="Conv2D"),
        TracedOperation(2.0, 5.0, "b", "CPU:1", operation_type="Conv2D"),
        TracedOperation(5.0, 90.0, "c", "CPU:1", waits=True, operation_type="CollectiveReduceV2"),
    ]
    shares = shares_by_kind(operations)
    assert list(shares.items()) == [
        ("convolutions, forward", pytest.approx(5 / 6)),
        ("ReLU", pytest.approx(1 / 6)),
    ]
