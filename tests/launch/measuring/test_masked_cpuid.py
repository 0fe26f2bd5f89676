"""Instructions that are hidden from a whole process."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from launch.measuring import masked_cpuid as module
from launch.measuring.masked_cpuid import is_masked, masked_cpuid
from towers.hardware.cpu_instructions import AVX512, cpu_instructions

CPUINFO = pathlib.Path("/proc/cpuinfo")
CAN_MASK = shutil.which("cc") is not None and CPUINFO.exists() and " cpuid_fault" in CPUINFO.read_text()
needs_masking = pytest.mark.skipif(not CAN_MASK, reason="no C compiler, or a CPU without CPUID faulting")
# NumPy asks by CPUID at its import. Threads and forks ask as well: XLA compiles in threads.
_FEATURES = """
import os, threading
import numpy as np
from numpy._core._multiarray_umath import __cpu_features__ as found
print(found["AVX2"], found["AVX512F"], found["AVX512_SPR"])
"""


def in_child(code: str, variables, *, timeout=60) -> subprocess.CompletedProcess:
    environment = {**os.environ, **variables}
    environment.pop("NPY_DISABLE_CPU_FEATURES", None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout
    )


@needs_masking
@pytest.mark.skipif(AVX512 not in cpu_instructions(), reason="a CPU without AVX-512")
@pytest.mark.parametrize("isa, expected", [("avx2", "True False False"), ("avx512", "True True False")])
def test_which_instructions_a_program_sees(isa, expected):
    done = in_child(_FEATURES, masked_cpuid(isa))
    assert done.stdout.strip() == expected, done.stderr


@needs_masking
def test_a_program_that_fails_still_ends_by_its_signal():
    fault = "import ctypes; ctypes.string_at(0)"
    assert in_child(fault, masked_cpuid("avx2")).returncode == -signal.SIGSEGV
    done = in_child(f"import faulthandler; faulthandler.enable(); {fault}", masked_cpuid("avx2"))
    assert done.returncode == -signal.SIGSEGV and "Segmentation fault" in done.stderr


@needs_masking
def test_preloaded_libraries_stay():
    found = masked_cpuid("avx2", {**os.environ, "LD_PRELOAD": "libm.so.6"})
    assert found["LD_PRELOAD"].endswith(" libm.so.6") and is_masked(found)


def test_without_a_compiler_nothing_is_masked(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    module._library.cache_clear()
    try:
        assert masked_cpuid("avx2") == {}
    finally:
        module._library.cache_clear()
