"""CPUs, GPUs, memory and threads of this machine."""

import os
import pathlib
import platform
import re
from collections.abc import Mapping

import psutil
import tensorflow as tf

from launch.health.section import Section, gib
from towers.control_groups import ROOT, core_quota, memory_limit
from towers.cores import num_cores
from towers.cpu_kernels import cpu_kernels
from towers.devices import EXAMPLES_PER_TOWER

NVIDIA_DEVICE = pathlib.Path("/dev/nvidia0")
CPU_INFO = pathlib.Path("/proc/cpuinfo")
# What the CPU may have that makes kernels faster.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
SPEED_VARIABLES = (
    "TF_ENABLE_ONEDNN_OPTS",
    "ONEDNN_MAX_CPU_ISA",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "OMP_NUM_THREADS",
    "KMP_BLOCKTIME",
    "KMP_AFFINITY",
)


def devices(
    environment: Mapping[str, str],
    *,
    root: pathlib.Path = ROOT,
    nvidia_device: pathlib.Path = NVIDIA_DEVICE,
) -> Section:
    """CPUs and GPUs that TensorFlow sees, the load, memory, and a container's limits.

    Args:
      environment: of this process.
      root: the folder that holds proc/ and sys/.
      nvidia_device: exists where a GPU is.
    """
    gpus = tf.config.list_physical_devices("GPU")
    cores, quota, limit = num_cores(root), core_quota(root), memory_limit(root)
    memory = psutil.virtual_memory()
    load = ", ".join(f"{value:.2f}" for value in psutil.getloadavg())
    facts = {
        "CPU model": cpu_model(),
        "CPU kernels": cpu_kernels(),
        "CPUs": [device.name for device in tf.config.list_physical_devices("CPU")],
        "GPUs": [f"{gpu.name} {_details(gpu)}" for gpu in gpus] or "none",
        "cores": f"{cores} usable of {os.cpu_count()}" + (f", CPU quota of {quota:g}" if quota else ""),
        "load": f"{load} over 1, 5 and 15 minutes",
        "memory GiB": f"{gib(memory.available)} free of {gib(memory.total)}",
        "memory limit GiB": "none" if limit is None else gib(limit),
    }
    problems = _gpu_problem(len(gpus), nvidia_device, environment)
    return Section(facts=facts, problems=tuple(problems))


def cpu_model(info: pathlib.Path = CPU_INFO) -> str:
    """The CPU's name and those of `_INSTRUCTIONS` that it has: 'AMD EPYC (avx2)'."""
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", _read(info), re.MULTILINE))
    has = [name for name in _INSTRUCTIONS if name in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'unknown')} ({', '.join(has) or platform.machine()})"


def threads(environment: Mapping[str, str]) -> Section:
    """Environment variables that set threads and kernels; the default number of towers and threads of a run."""
    cores = num_cores()
    return Section(
        facts={
            **{name: environment.get(name, "not set") for name in SPEED_VARIABLES},
            "default": f"on CPUs {cores} towers, or fewer so that each gets {EXAMPLES_PER_TOWER} examples of a "
            "batch; on GPUs one tower per GPU",
        },
    )


def _details(gpu) -> str:
    found = tf.config.experimental.get_device_details(gpu)
    capability = ".".join(map(str, found.get("compute_capability") or ("unknown",)))
    return f"{found.get('device_name', 'unknown model')}, compute capability {capability}"


def _gpu_problem(num_gpus: int, nvidia_device: pathlib.Path, environment: Mapping[str, str]) -> list[str]:
    # If the variable is not set every GPU is used; '' and -1 disable all.
    is_wanted = environment.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    if num_gpus or not is_wanted or not nvidia_device.exists():
        return []
    return [
        f"{nvidia_device} exists, but TensorFlow sees no GPU; run pip install 'tensorflow[and-cuda]'; "
        "if it still sees none, TF_CPP_MIN_LOG_LEVEL=0 shows which library is missing"
    ]


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
