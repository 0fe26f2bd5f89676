"""Which instructions kernels may use: what the CPU has, without those above oneDNN's limit."""

import pytest

from towers.hardware.cpu_instructions import cannot_compute, cpu_instructions, cpu_vendor

SAPPHIRE_RAPIDS = "flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile\n"


@pytest.fixture
def info(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(f"vendor_id\t: GenuineIntel\nmodel name\t: Some CPU\n{SAPPHIRE_RAPIDS}\n")
    return path


@pytest.mark.parametrize(
    "limit, expected",
    [
        ("", {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "fast_bfloat16"}),
        ("DEFAULT", {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "fast_bfloat16"}),
        ("AVX512_CORE_FP16", {"avx2", "avx512f", "avx512_bf16", "avx512_fp16"}),
        ("AVX512_CORE_BF16", {"avx2", "avx512f", "avx512_bf16"}),
        ("avx512_core", {"avx2", "avx512f"}),
        ("AVX2", {"avx2"}),
        ("SSE41", set()),
    ],
)
def test_oned_nn_s_limit(info, limit, expected):
    assert cpu_instructions(limit, info) == expected


@pytest.mark.parametrize(
    "vendor, limit, expected",
    [
        ("GenuineIntel", "AVX512_CORE_BF16", False),
        ("AuthenticAMD", "AVX512_CORE_BF16", True),
        ("AuthenticAMD", "AVX512_CORE", False),
        ("GenuineIntel", "", True),
    ],
)
def test_which_cpus_multiply_bfloat16_faster(tmp_path, vendor, limit, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(f"vendor_id\t: {vendor}\n{SAPPHIRE_RAPIDS}\n")
    assert ("fast_bfloat16" in cpu_instructions(limit, path)) == expected


@pytest.mark.parametrize(
    "vendor, family, limit, expected",
    [
        ("AuthenticAMD", 25, "", True),
        ("AuthenticAMD", 25, "AVX512_CORE", True),
        ("AuthenticAMD", 25, "AVX2", False),
        ("AuthenticAMD", 26, "", False),
        ("GenuineIntel", 25, "", False),
    ],
)
def test_which_cpus_have_avx512_in_halves(tmp_path, vendor, family, limit, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(f"vendor_id\t: {vendor}\ncpu family\t: {family}\n{SAPPHIRE_RAPIDS}\n")
    assert ("halved_avx512" in cpu_instructions(limit, path)) == expected


def test_the_vendor(info):
    assert cpu_vendor(info) == "GenuineIntel"


def test_arm_and_systems_without_the_file(tmp_path):
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n")
    assert cpu_instructions("", tmp_path / "arm") == {"bf16"}
    assert cpu_vendor(tmp_path / "arm") == cpu_vendor(tmp_path / "missing") == ""
    assert cpu_instructions("", tmp_path / "missing") == frozenset()


@pytest.mark.parametrize(
    "precision, limit, expected",
    [
        ("bfloat16", "AVX2", True),
        ("bfloat16", "AVX512_CORE", False),
        ("float16", "AVX512_CORE", True),
        ("float16", "", False),
        ("float32", "AVX2", False),
    ],
)
def test_what_tensorflow_would_crash_in(info, precision, limit, expected):
    assert cannot_compute(precision, limit, info) == expected
