"""--isa: the environment in which programs run the kernels of a CPU with older instructions.

An environment variable of each library limits it. Where CPUID can be masked (`masked_cpuid.py`), the CPU itself
hides its other instructions from all libraries. Otherwise matrix products in XLA's loops use all of this CPU's
instructions, and ResNet-20 makes 716 images/s with AVX2 instead of 683 (Intel Xeon with AMX). TensorFlow's Eigen
kernels are compiled for AVX and don't dispatch. In bfloat16 our programs ask /proc/cpuinfo, which lists AVX-512,
and TensorFlow aborts if oneDNN is limited to AVX2 where it finds AVX-512.
"""

import importlib
import os
import pathlib
from collections.abc import Mapping

from absl import flags

from launch.measuring.masked_cpuid import is_masked, masked_cpuid
from towers.errors import UserError
from towers.hardware.cpu_instructions import AVX2, AVX512, AVX512_BFLOAT16, CPU_INFO, cpu_instructions
from towers.precision import SHORT_PRECISIONS

FLAGS = flags.FLAGS
NO_ISA = "none"
# Names of the instructions in each library: oneDNN, XLA, PyTorch (ATen), MKL.
_NAMES = {
    "avx2": ("AVX2", "AVX2", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "AVX512", "avx512", "AVX512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "AVX512_BF16", "avx512", "AVX512"),
}
ISAS = (NO_ISA, *_NAMES)
# The instructions that this CPU must have itself: it can't imitate a CPU that has more.
_NEEDED = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512_BFLOAT16}
# The imitated CPU on which TensorFlow switches oneDNN on by itself.
_SWITCHED_ON = "avx512_bf16"


def check_isa(isa: str, info: pathlib.Path = CPU_INFO) -> None:
    """Raises UserError if this CPU lacks instructions of the imitated CPU.

    Args:
      isa: one of `ISAS`.
      info: Linux's description of the CPU; if there is no such file, nothing is checked.
    """
    if isa == NO_ISA or not info.exists():
        return
    has = cpu_instructions(info=info)
    if _NEEDED[isa] not in has:
        possible = [f"--isa={one}" for one, needed in _NEEDED.items() if needed in has]
        fix = f"use {' or '.join(possible)}, or omit it" if possible else "omit it"
        raise UserError(
            f"--isa={isa}: this CPU has no {_NEEDED[isa]}, so it can't imitate a CPU that has it; {fix}"
        )


def imitation(isa: str, *, is_peer: bool, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that make a program run as on a CPU with these instructions; {} for NO_ISA.

    oneDNN is switched on as on such a CPU: by `launch` for this project's programs; for others, as TensorFlow
    does, only with AVX512-BF16.

    Args:
      isa: one of `ISAS`.
      is_peer: whether it is another project's program.
      environment: this process's environment; its XLA_FLAGS are kept.
    """
    if isa == NO_ISA:
        return {}
    onednn, xla, aten, mkl = _NAMES[isa]
    found = {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "TF_ENABLE_ONEDNN_OPTS": "0" if is_peer and isa != _SWITCHED_ON else "1",
        "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} --xla_cpu_max_isa={xla}".strip(),
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        **masked_cpuid(isa, environment),
    }
    return found if isa != "avx2" else {**found, "NPY_DISABLE_CPU_FEATURES": _avx512_of_numpy()}


def why_not_imitated(isa: str, precision: str) -> str:
    """The reason why our own programs can't compute in a precision on the imitated CPU; '' if they can."""
    # TensorFlow asks the CPU itself whether oneDNN can compute in these precisions, and crashes if oneDNN can't.
    short = {"avx2": SHORT_PRECISIONS, "avx512": ("float16",), "avx512_bf16": ("float16",)}
    if precision in short.get(isa, ()):
        return f"TensorFlow can't run oneDNN's {precision} as on a CPU with {isa}"
    return ""


def imitated() -> dict[str, Mapping[str, str]]:
    """The variables that --isa sets for our programs and for peers, as benchmark.json records them."""
    return {
        "own programs": imitation(FLAGS.isa, is_peer=False),
        "peers": imitation(FLAGS.isa, is_peer=True),
    }


def in_words(found: Mapping) -> list[str]:
    """Lines below the table of a benchmark that was measured with --isa; [] without it."""
    settings = found["environment"].get("imitated CPU")
    if not settings:
        return []
    own, peers = (
        " ".join(f"{name}={value}" for name, value in settings[who].items()) for who in ("own programs", "peers")
    )
    lines = ["", f"imitated CPU: our programs ran with {own}", f"imitated CPU: peers ran with {peers}"]
    if not is_masked(settings["own programs"]):
        lines.append("imitated CPU: CPUID could not be masked; XLA's matrix products kept this CPU's instructions")
    return lines


def _avx512_of_numpy() -> str:
    """The names of the instructions beyond AVX2 for which NumPy has loops."""
    names = importlib.import_module("numpy._core._multiarray_umath").__cpu_dispatch__
    return " ".join(name for name in names if name.startswith("AVX512") or name == "X86_V4")
