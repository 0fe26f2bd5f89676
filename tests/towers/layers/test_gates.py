"""Which of our own kernels run on which CPU."""

import pytest

from towers import options
from towers.devices import Devices
from towers.options import StepOptions

CPU, GPU = "/device:CPU:0", "/device:GPU:0"
FUSED = {"fused_batch_norm", "compiled_activations"}
# Kernels on one or two threads, with oneDNN and AVX2.
CONVOLUTIONS = {"winograd_channels", "examples_as_channels"}
# Kernels on one thread with AVX-512, where batch norms are compiled if they exchange statistics.
WITH_AVX512 = {*FUSED, *CONVOLUTIONS, "compiled_batch_norm"}
SHORT_WITH_AVX512 = {*WITH_AVX512, "compiled_relu"}
SHORT_WITH_AMX = {*SHORT_WITH_AVX512, "amx"}
XEON_WITHOUT_AMX = ("avx2", "avx512f", "avx512_bf16")
ZEN5 = (*XEON_WITHOUT_AMX, "fast_bfloat16")
ZEN4 = (*ZEN5, "halved_avx512")
AMX = (*ZEN5, "amx_bf16")
BFLOAT16 = {"precision": "bfloat16"}


def enabled(monkeypatch, *instructions, device=CPU, onednn=True, threads=1, **given) -> set[str]:
    monkeypatch.setattr(options, "runs_onednn", lambda: onednn)
    devices = Devices(
        towers=(device,), parameters=CPU, threads_per_tower=threads, cpu_instructions=frozenset(instructions)
    )
    found = {name for name, is_on in vars(StepOptions(**given).kernels(devices)).items() if is_on}
    sums_exactly = given.get("precision") == "bfloat16" and device == CPU and not given.get("xla")
    assert ("exact_bias_gradients" in found) == sums_exactly
    return found - {"exact_bias_gradients", "num_threads"}


@pytest.mark.parametrize(
    "instructions, given, expected",
    [
        (AMX, {}, WITH_AVX512),
        (ZEN4, {}, WITH_AVX512),
        (ZEN4, {"onednn": False}, {*FUSED, "compiled_batch_norm"}),
        (ZEN4, {"xla": True}, {"fused_batch_norm"}),
        (AMX, BFLOAT16, SHORT_WITH_AMX),
        (AMX, BFLOAT16 | {"threads": 2}, {*FUSED, *CONVOLUTIONS, "amx"}),
        (AMX, BFLOAT16 | {"threads": 4}, {*FUSED, "examples_as_channels", "amx"}),
        (AMX, BFLOAT16 | {"onednn": False}, {*FUSED, "compiled_batch_norm", "compiled_relu", "float32_products"}),
        (AMX, {"precision": "float16"}, {*SHORT_WITH_AVX512, "float32_products"}),
        (ZEN4, BFLOAT16, SHORT_WITH_AVX512),
        (ZEN4, BFLOAT16 | {"threads": 2}, {*FUSED, *CONVOLUTIONS}),
        (ZEN4, BFLOAT16 | {"threads": 4}, FUSED),
        (XEON_WITHOUT_AMX, BFLOAT16, {*SHORT_WITH_AVX512, "float32_products"}),
        (XEON_WITHOUT_AMX, BFLOAT16 | {"tuned_for_cpu": False}, {"fused_batch_norm"}),
        (XEON_WITHOUT_AMX, BFLOAT16 | {"xla": True}, {"fused_batch_norm"}),
        (XEON_WITHOUT_AMX, BFLOAT16 | {"device": GPU}, {"fused_batch_norm"}),
        (XEON_WITHOUT_AMX, {"precision": "float64"}, WITH_AVX512),
        (("bf16",), BFLOAT16, FUSED),
        (("avx2", "avx512f"), {}, WITH_AVX512),
        (("avx2",), {}, {*CONVOLUTIONS, "compiled_batch_norm", "compiled_activations"}),
        (
            ("avx2",),
            BFLOAT16,
            {*CONVOLUTIONS, "compiled_batch_norm", "compiled_activations", "float32_products"},
        ),
        (("avx2",), {"threads": 4}, {"compiled_activations"}),
        (("avx2",), {"fused_batch_norm": False}, {*CONVOLUTIONS, "compiled_activations"}),
        (("avx2",), {"tuned_for_cpu": False}, set()),
        (("avx2",), {"onednn": False}, {*FUSED, "compiled_batch_norm"}),
        (("avx2",), {"xla": True}, {"fused_batch_norm"}),
        (("avx2",), {"device": GPU}, {"fused_batch_norm"}),
        (AMX, {"tuned_for_cpu": False, "fused_batch_norm": False}, set()),
        ((), {}, {"fused_batch_norm", "compiled_activations"}),
    ],
)
def test_kernels_of(monkeypatch, instructions, given, expected):
    assert enabled(monkeypatch, *instructions, **given) == expected


def test_gpus_have_no_deterministic_gradient_of_a_norm_by_given_moments():
    for device, needs_another in ((CPU, False), (GPU, True)):
        devices = Devices(towers=(device,), parameters=CPU, deterministic=True)
        assert StepOptions().kernels(devices).deterministic is needs_another


@pytest.mark.parametrize(
    "instructions, threads, expected",
    [
        (("avx2",), 1, 32),
        (("avx2",), 2, 128),
        (("avx2",), 4, 0),
        (ZEN5, 1, 64),
        (ZEN4, 1, 32),
        (ZEN4, 2, 128),
        (AMX, 2, 256),
        (AMX, 4, 0),
        (("bf16",), 1, 0),
    ],
)
def test_fewest_channels_of_winograd(monkeypatch, instructions, threads, expected):
    monkeypatch.setattr(options, "runs_onednn", lambda: True)
    devices = Devices(
        towers=(CPU,), parameters=CPU, threads_per_tower=threads, cpu_instructions=frozenset(instructions)
    )
    assert StepOptions().kernels(devices).winograd_channels == expected
