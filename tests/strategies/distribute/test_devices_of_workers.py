"""What the chief of ParameterServerStrategy makes of the devices that its workers describe."""

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
    """One graph serves all: an instruction that a CPU lacks would end its worker."""
    found = _devices_of_workers(
        {"worker:0": described(1, "avx2", "avx512f"), "worker:1": described(4, "avx2"), "ps:0": {"free_bytes": 1}}
    )
    assert (found.cpu_instructions, found.threads_per_tower) == (frozenset({"avx2"}), 4)
    kernels = StepOptions().kernels(found)
    assert not kernels.compiled_activations and not kernels.compiled_batch_norm
