"""Which of our own kernels run on which CPU."""

import pytest

from towers import options
from towers.devices import Devices
from towers.options import StepOptions

CPU, GPU = "/device:CPU:0", "/device:GPU:0"
FUSED = {"fused_batch_norm", "compiled_activations"}


def enabled(monkeypatch, *instructions, device=CPU, onednn=True, threads=1, **given) -> set[str]:
    monkeypatch.setattr(options, "runs_onednn", lambda: onednn)
    devices = Devices(
        towers=(device,), parameters=CPU, threads_per_tower=threads, cpu_instructions=frozenset(instructions)
    )
    return {name for name, is_on in vars(StepOptions(**given).kernels(devices)).items() if is_on}


@pytest.mark.parametrize(
    "instructions, given, expected",
    [
        (("avx2", "avx512f", "amx_bf16"), {}, {"fused_batch_norm", "compiled_activations", "images_side_by_side"}),
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16"), {}, {*FUSED, "images_side_by_side"}),
        (("avx2", "avx512f", "avx512_bf16"), {}, {*FUSED, "examples_as_channels"}),
        (("avx2", "avx512f", "avx512_bf16"), {"onednn": False}, FUSED),
        (("avx2", "avx512f", "avx512_bf16"), {"xla": True}, {"fused_batch_norm"}),
        (("avx2", "avx512f"), {}, FUSED),
        (("avx2",), {}, {"compiled_batch_norm", "compiled_activations", "winograd_channels"}),
        (("avx2",), {"threads": 4}, {"compiled_activations"}),
        (("avx2",), {"fused_batch_norm": False}, {"compiled_activations", "winograd_channels"}),
        (("avx2",), {"tuned_for_cpu": False}, set()),
        (("avx2",), {"onednn": False}, {"fused_batch_norm", "compiled_activations"}),
        (("avx2",), {"xla": True}, {"fused_batch_norm"}),
        (("avx2",), {"device": GPU}, {"fused_batch_norm"}),
        (("avx2", "avx512f", "amx_bf16"), {"tuned_for_cpu": False, "fused_batch_norm": False}, set()),
        ((), {}, {"fused_batch_norm", "compiled_activations"}),
    ],
)
def test_kernels_of(monkeypatch, instructions, given, expected):
    assert enabled(monkeypatch, *instructions, **given) == expected
