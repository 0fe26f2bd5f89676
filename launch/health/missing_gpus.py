"""Why TensorFlow finds no GPU although this machine has one: TensorFlow's own reason in one line."""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping

import tensorflow as tf

# At least one exists where NVIDIA's driver runs; containers may hide others. WSL2 has only the last one.
DRIVER_SIGNS = (
    pathlib.Path("/proc/driver/nvidia/version"),
    pathlib.Path("/dev/nvidia0"),
    pathlib.Path("/usr/lib/wsl/lib/libcuda.so.1"),
)
_CUDA = "CUDA_VISIBLE_DEVICES"
# CUDA ignores the list from its first item that is no GPU's number or name.
_NAME_OF_A_GPU = r"\d|GPU-|MIG-"
# Values that hide all GPUs; the last is Slurm's.
_HIDING = ("", "none", "void", "nodevfiles")
_SECONDS = 60.0
_LOOK = "import tensorflow as tf; tf.config.list_physical_devices('GPU')"
# Parts of messages that TensorFlow 2.21 logs, the most specific first. It logs 'Could not find cuda drivers' for a
# missing libcudart too.
_REASONS = (
    "failed call to cuInit",
    "Cannot dlopen",
    "Could not load dynamic library",
    "Ignoring visible",
    "Could not find cuda drivers",
    "CUDA",
)
_LOG_PREFIX = re.compile(r"^(?:\d{4}-\S+ \S+: )?[IWEF]\d* .*?\] |^\d{4}-\S+ \S+ [IWEF] \S+\] ")
_LONGEST = 300
_FIX = "install the libraries that it needs with pip install 'tensorflow[and-cuda]' (our extra [gpu])"
# In a container or under a scheduler the driver's library may be present without a GPU.
_FIX_OF_DRIVER = "check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, that GPUs were passed to it"


def missing_gpus(
    num_found: int,
    environ: Mapping[str, str] = os.environ,
    *,
    signs: tuple[pathlib.Path, ...] = DRIVER_SIGNS,
) -> str:
    """A line for the user if there is a driver and TensorFlow finds no GPU; '' if nothing is missing.

    Only if GPUs are missing, a second process imports TensorFlow with all of its messages, which takes seconds: in
    this process most are hidden.

    Args:
      num_found: number of GPUs that TensorFlow finds.
      environ: the environment, whose variables may hide all GPUs, on purpose (-1) or not.
      signs: files of which at least one exists if a driver runs.
    """
    sign = next((path for path in signs if path.exists()), None)
    if num_found or sign is None or _hides_all(environ):
        return ""
    named = environ.get(_CUDA)
    if named is not None and not re.match(_NAME_OF_A_GPU, named.strip()):
        return (
            f"{_CUDA}={named}: it does not begin with a GPU's number, or name (GPU-... or MIG-...), so CUDA hides "
            "all GPUs; give for example 0,1, or unset it to use all"
        )
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        return f"{sign} exists, but this TensorFlow was built without CUDA: run pip install 'tensorflow[and-cuda]'"
    reason = reason_in(messages_of_tensorflow(environ))
    fix = _FIX_OF_DRIVER if "cuInit" in reason else _FIX
    return f"{sign} exists, but TensorFlow finds no GPU ({reason}): {fix}"


def _hides_all(environ: Mapping[str, str]) -> bool:
    """Whether a variable hides all GPUs on purpose."""
    first = environ.get(_CUDA, "0").partition(",")[0].strip().lower()
    return first in _HIDING or first.startswith("-") or environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void")


def messages_of_tensorflow(environ: Mapping[str, str]) -> str:
    """All that TensorFlow logs while a new process imports it and looks for GPUs; '' if it takes too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK],
            env={**environ, "TF_CPP_MIN_LOG_LEVEL": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stderr


def reason_in(messages: str) -> str:
    """TensorFlow's reason among its log messages, without time and place, in one line."""
    lines = [" ".join(_LOG_PREFIX.sub("", line).split()) for line in messages.splitlines()]
    found = (line for sign in _REASONS for line in lines if sign in line)
    return next(found, "it gives no reason")[:_LONGEST].rstrip(".")
