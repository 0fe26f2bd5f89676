"""Which devices the towers and the parameters live on, and how many threads each tower gets.

Only this file distinguishes CPUs and GPUs. All others use device names.
"""

import dataclasses
import os
import re

import tensorflow as tf

from towers.errors import UserError

KINDS = ("auto", "cpu", "gpu")
# Batches come from the host's memory: they are sliced there and each part is sent to its tower.
HOST = "/device:CPU:0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one process, by TensorFlow's names ('/device:CPU:0').

    Attributes:
      towers: the device of each tower; several towers may share one.
      parameters: the device of the parameters, the update and its slots.
      threads_per_tower: number of threads for one operation of a tower; 0 for TensorFlow's own choice.
    """

    towers: tuple[str, ...]
    parameters: str
    threads_per_tower: int = 0

    @property
    def num_towers(self) -> int:
        return len(self.towers)

    @property
    def on_cpu(self) -> bool:
        """Whether the towers run on CPUs."""
        return all("CPU" in tower for tower in self.towers)


def num_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(num_towers: int, cores: int) -> int:
    """Number of threads for one operation of each CPU tower, so that the towers use all cores."""
    return max(1, cores // num_towers)


def configure_devices(
    *,
    num_towers: int | None = None,
    kind: str = "auto",
    parameter_device: str = "cpu",
    threads_per_tower: int | None = None,
    num_processes: int = 1,
) -> Devices:
    """Configures the devices of this process. Call it before TensorFlow computes anything.

    Each visible GPU becomes a tower (with memory growth, so that other programs can use the card too). Without
    GPUs, each core becomes a logical CPU device and a tower. CPU towers share the cores evenly: with one tower for
    each core, each operation runs on one thread. That measured faster than one operation over all cores.

    Args:
      num_towers: None for one tower for each GPU, or for each core.
      kind: 'cpu', 'gpu', or 'auto' for GPUs if there are any.
      parameter_device: 'cpu', 'cpu:K' or 'gpu:K'.
      threads_per_tower: None for cores / towers.
      num_processes: number of processes that share this machine's cores, this one included.

    Raises:
      UserError: fewer GPUs than asked for, an unknown device, or TensorFlow already runs with other devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if kind not in KINDS:
        raise UserError(f"tower device {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if num_towers is not None and num_towers < 1:
        raise UserError(f"num_towers={num_towers}: it must be at least 1; omit it for a tower on every device")
    on_gpu = kind == "gpu" or (kind == "auto" and bool(gpus))
    _check_gpus(len(gpus), on_gpu, num_towers)
    cores = max(1, num_cores() // num_processes)
    count = num_towers or (len(gpus) if on_gpu else cores)
    threads = 0 if on_gpu else threads_per_tower or threads_for(count, cores)
    parameters = _parameter_device(parameter_device, num_cpus=1 if on_gpu else count, num_gpus=len(gpus))
    _configure_runtime(gpus, num_cpus=1 if on_gpu else count, threads=threads)
    towers = tuple(f"/device:{'GPU' if on_gpu else 'CPU'}:{index}" for index in range(count))
    return Devices(towers=towers, parameters=parameters, threads_per_tower=threads)


def _check_gpus(num_gpus, on_gpu, num_towers):
    if not on_gpu:
        return
    if num_gpus == 0:
        raise UserError("tower device 'gpu': TensorFlow finds no GPU; use cpu, or install tensorflow[and-cuda]")
    if num_towers is not None and num_towers > num_gpus:
        raise UserError(
            f"num_towers={num_towers}: each GPU is one tower and {num_gpus} are visible; use {num_gpus}, or cpu"
        )


def _parameter_device(text: str, *, num_cpus: int, num_gpus: int) -> str:
    match = re.fullmatch(r"(cpu|gpu)(?::(\d+))?", text.strip().lower())
    if match is None:
        raise UserError(f"parameter device {text!r} is unknown: use cpu, cpu:K or gpu:K")
    kind, index = match.group(1), int(match.group(2) or 0)
    present = {"cpu": num_cpus, "gpu": num_gpus}[kind]
    if index >= present:
        known = [f"cpu:{k}" for k in range(num_cpus)] + [f"gpu:{k}" for k in range(num_gpus)]
        raise UserError(f"parameter device {text!r} does not exist: use one of {', '.join(known)}")
    return f"/device:{kind.upper()}:{index}"


def _configure_runtime(gpus, *, num_cpus: int, threads: int) -> None:
    """Sets logical devices, memory growth and threads. All of them can be set only before TensorFlow starts."""
    try:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if threads:
            _set_threads(threads)
            _optimize_towers_alone()
        cpu = tf.config.list_physical_devices("CPU")[0]
        if len(tf.config.get_logical_device_configuration(cpu) or [None]) < num_cpus:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_cpus)
    except RuntimeError as error:
        raise UserError(
            f"{num_cpus} logical CPU devices: TensorFlow already runs in this process with other devices; "
            "configure the devices before the first tensor"
        ) from error


def _optimize_towers_alone() -> None:
    """Disables TensorFlow's graph optimizer: `towers.traced_once` runs it on the tower, before the copies.

    The first step of eight ResNet-20 towers takes 2.2 s instead of 4, at the same speed afterwards; of one tower
    1.9 s either way.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _set_threads(threads: int) -> None:
    """Sets the numbers of threads. If TensorFlow already runs, its own numbers stay."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, num_cores()))
    except RuntimeError:
        pass
