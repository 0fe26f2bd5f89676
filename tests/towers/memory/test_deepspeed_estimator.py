"""DeepSpeed's estimates: the figures that its documentation prints, and those of its code for two nodes."""

import pytest

from tests.towers.user_errors import refused
from towers.memory.deepspeed_estimator import DeepSpeedEstimate, zero2_estimate, zero3_estimate

# The documentation's t5-3b on 8 GPUs, in GiB (docs/code-docs/source/memory.rst).
T5_3B, LARGEST_LAYER = 2_851_000_000, 32_000_000
GIB = 2**30


def in_gib(estimate: DeepSpeedEstimate) -> tuple[float, float]:
    return round(estimate.cpu_bytes / GIB, 2), round(estimate.gpu_bytes / GIB, 2)


def test_zero2_as_documented():
    assert in_gib(zero2_estimate(T5_3B, gpus_per_node=8)) == (127.45, 5.31)
    # The documentation prints 15.93, by the formula that the code had before 2024.
    assert in_gib(zero2_estimate(T5_3B, gpus_per_node=8, offload_optimizer=False)) == (127.45, 11.28)
    assert round((4 * T5_3B + 16 * T5_3B / 8) / GIB, 2) == 15.93


@pytest.mark.parametrize(
    "offload_parameters, offload_optimizer, built_sharded, gib",
    [
        (True, True, True, (71.69, 0.12)),
        (True, True, False, (127.45, 0.12)),
        (False, True, True, (63.72, 0.78)),
        (False, True, False, (127.45, 0.78)),
        (False, False, True, (1.43, 6.09)),
        (False, False, False, (127.45, 6.09)),
    ],
)
def test_zero3_as_documented(offload_parameters, offload_optimizer, built_sharded, gib):
    estimate = zero3_estimate(
        T5_3B,
        LARGEST_LAYER,
        gpus_per_node=8,
        offload_parameters=offload_parameters,
        offload_optimizer=offload_optimizer,
        built_sharded=built_sharded,
    )
    assert in_gib(estimate) == gib


def test_two_nodes():
    """What DeepSpeed's functions return for 1,000,003 parameters on 2 nodes of 3 GPUs."""
    hardware = {"gpus_per_node": 3, "num_nodes": 2}
    assert zero2_estimate(1_000_003, **hardware) == DeepSpeedEstimate(36_000_108, 2_000_006)
    assert zero2_estimate(1_000_003, **hardware, offload_optimizer=False) == DeepSpeedEstimate(
        18_000_054, 5_000_015
    )
    estimates = [
        zero3_estimate(1_000_003, 3_001, **hardware, offload_parameters=parameters, offload_optimizer=optimizer)
        for parameters, optimizer in ((True, True), (False, True), (False, False))
    ]
    assert estimates == [
        DeepSpeedEstimate(13_500_040, 12_004),
        DeepSpeedEstimate(12_000_036, 345_338),
        DeepSpeedEstimate(54_018, 3_012_013),
    ]


def test_parameters_alone_are_not_offloaded():
    with refused("offload_parameters=True", "offload_optimizer=False"):
        zero3_estimate(100, 10, offload_optimizer=False)
