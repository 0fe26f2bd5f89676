"""Which devices the towers and the parameters live on, and how many threads each tower gets.

The one place where CPUs and GPUs differ. Everything else knows device names.
"""

import dataclasses
import os
import re

import tensorflow as tf

from towers.errors import UserError

KINDS = ("auto", "cpu", "gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one process, by the names TensorFlow places operations with ('/device:CPU:0').

    Attributes:
      towers: one device a tower; the same device may stand more than once.
      parameters: where the parameters, the update and its slots live.
      threads_per_tower: threads one operation of a tower may use; 0 is TensorFlow's own choice.
    """

    towers: tuple[str, ...]
    parameters: str
    threads_per_tower: int = 0

    @property
    def num_towers(self) -> int:
        return len(self.towers)

    @property
    def on_cpu(self) -> bool:
        """Whether the towers are CPUs."""
        return all("CPU" in tower for tower in self.towers)


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(num_towers: int, cores: int) -> int:
    """Threads an operation of each of `num_towers` CPU towers may use, so that together they fill the cores."""
    return max(1, cores // num_towers)


def configure_devices(
    *,
    num_towers: int | None = None,
    kind: str = "auto",
    parameter_device: str = "cpu",
    threads_per_tower: int | None = None,
    num_processes: int = 1,
) -> Devices:
    """Makes the devices of this process ready; to be called before TensorFlow computes anything.

    Every visible GPU is a tower (with memory growth, so that others can use the card too), or else one
    logical CPU device a core. CPU towers share the cores evenly: with as many towers as cores each operation
    runs on one thread, which measured faster than one operation over all cores.

    Args:
      num_towers: None for every GPU, or one tower a core.
      kind: 'cpu', 'gpu', or 'auto' for GPUs where there are any.
      parameter_device: 'cpu', 'cpu:K' or 'gpu:K'.
      threads_per_tower: None for the cores divided by the towers.
      num_processes: how many processes share this machine's cores, this one included.

    Raises:
      UserError: fewer GPUs than asked for, an unknown device, or TensorFlow was started differently before.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if kind not in KINDS:
        raise UserError(f"tower device {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if num_towers is not None and num_towers < 1:
        raise UserError(f"num_towers={num_towers}: at least one tower does the work; leave it out for all devices")
    on_gpu = kind == "gpu" or (kind == "auto" and bool(gpus))
    _check_gpus(len(gpus), on_gpu, num_towers)
    cores = max(1, num_cores() // num_processes)
    count = num_towers or (len(gpus) if on_gpu else cores)
    threads = 0 if on_gpu else threads_per_tower or threads_for(count, cores)
    parameters = _parameter_device(parameter_device, num_cpus=1 if on_gpu else count, num_gpus=len(gpus))
    _configure_runtime(gpus, num_cpus=1 if on_gpu else count, threads=threads)
    towers = tuple(f"/device:{'GPU' if on_gpu else 'CPU'}:{place}" for place in range(count))
    return Devices(towers=towers, parameters=parameters, threads_per_tower=threads)


def _check_gpus(num_gpus, on_gpu, num_towers):
    if not on_gpu:
        return
    if num_gpus == 0:
        raise UserError(
            "tower device 'gpu': TensorFlow sees no GPU here; use cpu, or install tensorflow[and-cuda]"
        )
    if num_towers is not None and num_towers > num_gpus:
        raise UserError(
            f"num_towers={num_towers}: one tower a GPU and {num_gpus} are visible; use {num_gpus} or cpu"
        )


def _parameter_device(text: str, *, num_cpus: int, num_gpus: int) -> str:
    match = re.fullmatch(r"(cpu|gpu)(?::(\d+))?", text.strip().lower())
    if match is None:
        raise UserError(f"parameter device {text!r} is unknown: use cpu, cpu:K or gpu:K")
    kind, place = match.group(1), int(match.group(2) or 0)
    present = {"cpu": num_cpus, "gpu": num_gpus}[kind]
    if place >= present:
        known = [f"cpu:{k}" for k in range(num_cpus)] + [f"gpu:{k}" for k in range(num_gpus)]
        raise UserError(f"parameter device {text!r} is not here: use one of {', '.join(known)}")
    return f"/device:{kind.upper()}:{place}"


def _configure_runtime(gpus, *, num_cpus: int, threads: int) -> None:
    """Logical devices, memory growth and threads; all of them can be set only before TensorFlow starts."""
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
            f"{num_cpus} logical CPU devices: TensorFlow is already running in this process with others; "
            "configure the devices before the first tensor"
        ) from error


def _optimize_towers_alone() -> None:
    """Switches TensorFlow's graph optimizer off: `towers.traced_once` runs it on the tower, before the copies.

    Eight ResNet-20 towers begin in 2.2 s instead of 4, at the same speed; one in 1.9 either way.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _set_threads(threads: int) -> None:
    """Threads are a preference: once TensorFlow runs, what it has is kept."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, num_cores()))
    except RuntimeError:
        pass
