"""Hides instructions from every library of a process, even from those that no environment variable limits.

TensorFlow itself and XLA's matrix products (YNNPACK) ask the CPU, by the instruction CPUID. Where Linux can make
it fault, a small library answers in its place (`masked_cpuid.c`).
"""

import atexit
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

_SOURCE = pathlib.Path(__file__).with_suffix(".c")
_LOADED, _ISA = "LD_PRELOAD", "TOWERS_ISA"
_REMOVED_BY = "TOWERS_ISA_REMOVED_BY"
_SECONDS = 60
_ASK = "import ctypes, sys; sys.exit(ctypes.CDLL(None).towers_cpuid_is_masked() != 1)"


def masked_cpuid(isa: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables with which programs see only these instructions; {} if CPUID can't be masked here.

    It needs Linux on an x86 CPU with CPUID faulting (`cpuid_fault` in /proc/cpuinfo), and a C compiler.

    Args:
      isa: 'avx2', 'avx512' or 'avx512_bf16'.
      environment: this process's environment; its preloaded libraries are kept.
    """
    library = _library()
    if library is None:
        return {}
    found = {_LOADED: " ".join([str(library), *environment.get(_LOADED, "").split()]), _ISA: isa}
    return found if _masks({**environment, **found}) else {}


def successor_removes() -> dict[str, str]:
    """The variable that makes the program that `execve` starts in this process remove the library at its end."""
    return {_REMOVED_BY: f"{os.getpid()}:{_folder()}"}


def remove_as_successor() -> None:
    """Removes the library at the end of this program, if `execve` started it with `successor_removes`.

    A child process inherits the variable too, but removes nothing, because its process id differs.
    """
    process, _, folder = os.environ.get(_REMOVED_BY, "").partition(":")
    if process == f"{os.getpid()}":
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def is_masked(variables: Mapping[str, str]) -> bool:
    """Whether these variables of an imitation mask CPUID."""
    return _ISA in variables


@functools.cache
def _library() -> pathlib.Path | None:
    """The compiled library; None if it can't be compiled."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = _folder() / "libmasked_cpuid.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"]
    return library if _succeeds(command) else None


@functools.cache
def _folder() -> pathlib.Path:
    """A temporary folder, removed when this process ends."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="towers-cpuid-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _masks(environment: Mapping[str, str]) -> bool:
    return _succeeds([sys.executable, "-c", _ASK], env=environment)


def _succeeds(command, **given) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False, **given).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
