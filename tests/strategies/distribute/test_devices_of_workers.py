"""What the chief of ParameterServerStrategy concludes from the devices that its workers describe."""

from strategies.distribute.coordinated_roles import _devices_of_workers
from towers.options import StepOptions


def described(threads, *instructions):
    return {
        "towers": ["/cpu:0"],
        "parameters": "/cpu:0",
        "threads": threads,
        "instructions": sorted(instructions),
    }


def test_kernels_are_those_that_all_workers_can_run():
    """All workers run one graph: an instruction that a worker's CPU lacks would end that worker."""
    found = _devices_of_workers(
        {"worker:0": described(1, "avx2", "avx512f"), "worker:1": described(4, "avx2"), "ps:0": {"free_bytes": 1}}
    )
    assert (found.cpu_instructions, found.threads_per_tower) == (frozenset({"avx2"}), 4)
    kernels = StepOptions().kernels(found)
    assert not kernels.compiled_activations and not kernels.compiled_batch_norm
