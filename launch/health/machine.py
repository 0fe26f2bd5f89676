"""CPUs, GPUs, memory and threads of this machine."""

import os
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence

import psutil
import tensorflow as tf

from launch.health.compute_capability import how_it_runs, problem_of
from launch.health.missing_gpus import DRIVER_SIGNS, missing_gpus
from launch.health.section import Section, gib
from towers.devices import EXAMPLES_PER_TOWER
from towers.hardware.control_groups import ROOT, core_quota, memory_limit
from towers.hardware.cores import num_cores, usable_cpus
from towers.hardware.cpu_kernels import cpu_kernels
from towers.hardware.cpu_topology import numa_nodes, physical_cores
from towers.hardware.gpus import Gpu, gpu_of

CPU_INFO = pathlib.Path("/proc/cpuinfo")
# Instructions that make kernels faster.
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
    signs: tuple[pathlib.Path, ...] = DRIVER_SIGNS,
) -> Section:
    """CPUs and GPUs that TensorFlow sees, the load, memory, and a container's limits.

    Args:
      environment: this process's environment.
      root: the folder that holds proc/ and sys/.
      signs: files of which at least one exists on a machine with a GPU.
    """
    gpus = [gpu_of(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    built_for = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    cores, quota, limit = num_cores(root), core_quota(root), memory_limit(root)
    memory = psutil.virtual_memory()
    load = ", ".join(f"{value:.2f}" for value in psutil.getloadavg())
    facts = {
        "CPU model": cpu_model(),
        "CPU kernels": cpu_kernels(),
        "CPUs": [device.name for device in tf.config.list_physical_devices("CPU")],
        "GPUs": [_described(gpu, built_for) for gpu in gpus] or "none",
        "cores": f"{cores} usable of {_all_cores(root)}" + (f", CPU quota of {quota:g}" if quota else ""),
        "NUMA nodes": str(len(numa_nodes(usable_cpus(), root))),
        "load": f"{load} over 1, 5 and 15 minutes",
        "memory GiB": f"{gib(memory.available)} free of {gib(memory.total)}",
        "memory limit GiB": "none" if limit is None else gib(limit),
    }
    known = [gpu for gpu in gpus if gpu.compute_capability]
    problems = [missing_gpus(len(gpus), environment, signs=signs)]
    problems += [problem_of(gpu.model, gpu.compute_capability, built_for) for gpu in known]
    return Section(facts=facts, problems=tuple(filter(None, problems)))


def cpu_model(info: pathlib.Path = CPU_INFO) -> str:
    """The CPU's name and those of `_INSTRUCTIONS` that it has: 'AMD EPYC (avx2)'."""
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", _read(info), re.MULTILINE))
    has = [name for name in _INSTRUCTIONS if name in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'unknown')} ({', '.join(has) or platform.machine()})"


def threads(environment: Mapping[str, str]) -> Section:
    """Environment variables that set threads and kernels, and a run's default numbers of towers and threads."""
    cores = num_cores()
    return Section(
        facts={
            **{name: environment.get(name, "not set") for name in SPEED_VARIABLES},
            "default": f"on CPUs {cores} towers, or fewer so that each gets {EXAMPLES_PER_TOWER} examples of a "
            "batch; on GPUs one tower per GPU",
        },
    )


def _all_cores(root: pathlib.Path) -> int:
    """Number of the machine's cores; hyperthreads of a core count once, as in `num_cores`."""
    return physical_cores(range(os.cpu_count() or 1), root)


def _described(gpu: Gpu, built_for: Sequence[str]) -> str:
    memory = "" if gpu.memory_bytes is None else f", {gib(gpu.memory_bytes)} GiB"
    how = gpu.compute_capability and how_it_runs(gpu.compute_capability, built_for)
    return f"GPU:{gpu.index} {gpu.described}{memory}" + (f", {how}" if how else "")


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
