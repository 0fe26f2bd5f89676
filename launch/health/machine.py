"""Processors, memory, and the threads that make use of them."""

import math
import os
import pathlib
from collections.abc import Mapping

import psutil
import tensorflow as tf

from launch.health.section import Section, gib
from towers.devices import num_cores, threads_for

# Linux's limits for a container (control groups, version 2).
CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup")
NVIDIA_DEVICE = pathlib.Path("/dev/nvidia0")
THREAD_VARIABLES = (
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "OMP_NUM_THREADS",
    "KMP_BLOCKTIME",
    "KMP_AFFINITY",
)


def devices(
    environment: Mapping[str, str],
    *,
    control_group: pathlib.Path = CONTROL_GROUP,
    nvidia_device: pathlib.Path = NVIDIA_DEVICE,
) -> Section:
    """CPUs and GPUs as TensorFlow sees them, their load, and memory."""
    gpus = tf.config.list_physical_devices("GPU")
    cores, quota = num_cores(), _core_quota(control_group)
    memory = psutil.virtual_memory()
    load = ", ".join(f"{value:.2f}" for value in psutil.getloadavg())
    facts = {
        "CPUs": [device.name for device in tf.config.list_physical_devices("CPU")],
        "GPUs": [f"{gpu.name} {_details(gpu)}" for gpu in gpus] or "none",
        "cores": f"{cores} usable of {os.cpu_count()}" + (f", time of {quota:g}" if quota else ""),
        "load": f"{load} over 1, 5 and 15 minutes",
        "memory GiB": f"{gib(memory.available)} free of {gib(memory.total)}",
        "memory limit GiB": _memory_limit(control_group),
    }
    problems = [*_quota_problem(quota, cores), *_gpu_problem(len(gpus), nvidia_device, environment)]
    return Section(facts=facts, problems=tuple(problems))


def threads(environment: Mapping[str, str]) -> Section:
    """What the environment says of threads, and what a run takes by default."""
    cores = num_cores()
    return Section(
        facts={
            **{name: environment.get(name, "not set") for name in THREAD_VARIABLES},
            "default": f"{cores} towers of {threads_for(cores, cores)} thread on CPU, one tower a GPU",
        },
    )


def _details(gpu) -> str:
    found = tf.config.experimental.get_device_details(gpu)
    capability = ".".join(map(str, found.get("compute_capability") or ("unknown",)))
    return f"{found.get('device_name', 'of unknown kind')}, compute capability {capability}"


def _quota_problem(quota: float | None, cores: int) -> list[str]:
    """A run takes a tower for each core it sees; more than it has the time of would wait for one another."""
    if quota is None or math.ceil(quota) >= cores:
        return []
    return [
        f"this container gets the time of {quota:g} cores and sees {cores}, each of which would be a tower: "
        f"give --num_towers={math.ceil(quota)} --threads_per_tower=1"
    ]


def _gpu_problem(num_gpus: int, nvidia_device: pathlib.Path, environment: Mapping[str, str]) -> list[str]:
    # Without the variable every GPU is wanted; with '' or -1 none is.
    is_wanted = environment.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    if num_gpus or not is_wanted or not nvidia_device.exists():
        return []
    return [
        f"TensorFlow sees no GPU though {nvidia_device} is here: pip install 'tensorflow[and-cuda]', "
        "and with TF_CPP_MIN_LOG_LEVEL=0 see what it misses"
    ]


def _core_quota(control_group: pathlib.Path) -> float | None:
    """Cores' worth of time, or None without a bound."""
    quota, _, period = _read(control_group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _memory_limit(control_group: pathlib.Path) -> str:
    limit = _read(control_group / "memory.max")
    return gib(int(limit)) if limit.isdecimal() else "none"


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
