"""Which CPU instructions kernels may use: only those that decide which kernels and precisions are fast.

oneDNN, whose kernels TensorFlow runs, can be limited to older instructions: a CPU with AVX-512 then runs the
kernels of one with AVX2.
"""

import pathlib
import re

CPU_INFO = pathlib.Path("/proc/cpuinfo")
# The environment variable that limits oneDNN.
ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
AVX2, AVX512 = "avx2", "avx512f"
# Instructions for products of bfloat16 numbers: of vectors, of matrices, and of either on ARM.
AVX512_BFLOAT16, AMX_BFLOAT16, ARM_BFLOAT16 = "avx512_bf16", "amx_bf16", "bf16"
AVX512_FLOAT16, AMX_FLOAT16 = "avx512_fp16", "amx_fp16"
# No instruction's name: oneDNN multiplies bfloat16 numbers faster than float32's, on matrix units or vectors.
# With AVX512-BF16 it depends on the CPU: a step of ResNet-20 takes 0.7 times as long as in float32 on AMD's Zen 4;
# on Intel's CPUs, which multiply half as many vectors a cycle, convolutions take 1.5 times as long.
FAST_BFLOAT16 = "fast_bfloat16"
# No instruction's name: vectors of 512 bits are computed in two halves, as on AMD's Zen 4. Such vectors gain less
# over AVX2's: 3x3 convolutions of 32 channels by Winograd's method take 0.7 to 0.98 of a direct one's time, on an
# Intel Xeon 1.14 to 1.27.
HALVED_AVX512 = "halved_avx512"
# A result of `cpu_vendor`.
AMD = "AuthenticAMD"
# The CPU family that Linux reports for AMD's Zen 3, which has no AVX-512, and Zen 4; for Zen 5 it is 26.
_ZEN4_FAMILY = "25"

_KNOWN = (AVX2, AVX512, AVX512_BFLOAT16, AVX512_FLOAT16, AMX_BFLOAT16, AMX_FLOAT16, ARM_BFLOAT16)
# Where the CPU has these, TensorFlow calls oneDNN in the precision.
_ASKED_BY_TENSORFLOW = {"bfloat16": AVX512, "float16": AVX512_FLOAT16}
# How many of these instructions each value of the limit allows; other values limit nothing, as in oneDNN.
_ALLOWED = {
    **dict.fromkeys(("SSE41", "AVX"), 0),
    **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), 1),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), 2),
    "AVX512_CORE_BF16": 3,
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX10_1_512"), 4),
    **dict.fromkeys(("AVX512_CORE_AMX", "AVX10_1_512_AMX"), 5),
}


def cpu_instructions(limit: str = "", info: pathlib.Path = CPU_INFO) -> frozenset[str]:
    """The instructions that this CPU has and that oneDNN may use, FAST_BFLOAT16 and HALVED_AVX512.

    Args:
      limit: the value of ONEDNN_MAX_CPU_ISA; '' if it is not set.
      info: what Linux says about the CPU; on other systems there is no such file, and the result is empty.
    """
    has = _field("flags|Features", info).split()
    found = frozenset(has).intersection(_KNOWN[: _ALLOWED.get(limit.upper(), len(_KNOWN))])
    # The file is long on a machine of many cores, so it is read again only where the vendor matters.
    is_amd = AVX512 in found and cpu_vendor(info) == AMD
    is_fast = AMX_BFLOAT16 in found or (AVX512_BFLOAT16 in found and is_amd)
    is_halved = is_amd and _field("cpu family", info).strip() == _ZEN4_FAMILY
    names = ((FAST_BFLOAT16, is_fast), (HALVED_AVX512, is_halved))
    return found.union(name for name, holds in names if holds)


def has_avx2_alone(instructions: frozenset[str]) -> bool:
    """Whether the widest vectors are AVX2's: there some of oneDNN's kernels are slower than compiled loops."""
    return AVX2 in instructions and AVX512 not in instructions


def cpu_vendor(info: pathlib.Path = CPU_INFO) -> str:
    """'GenuineIntel', 'AuthenticAMD'; '' for ARM and where Linux does not report it."""
    return _field("vendor_id", info).strip()


def cannot_compute(precision: str, limit: str, info: pathlib.Path = CPU_INFO) -> bool:
    """Whether this precision would abort the process: TensorFlow checks the CPU, but oneDNN obeys the limit."""
    needed = _ASKED_BY_TENSORFLOW.get(precision)
    return needed in cpu_instructions(info=info) - cpu_instructions(limit, info)


def _field(names: str, info: pathlib.Path) -> str:
    """The field of the first CPU, under one of these names, that Linux reports; '' if there is none."""
    try:
        text = info.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^(?:{names})\s*:(.*)$", text, re.MULTILINE)
    return found[1] if found else ""
