"""Configures the devices of a process: logical CPUs, GPUs, threads, kernels, and where its parameters are."""

import contextlib
import re
from collections.abc import Sequence

import tensorflow as tf

from towers.devices import AUTOMATIC, REPLICATED, SHARDED, Devices, default_towers, spread_by, threads_for
from towers.errors import UserError, is_integer
from towers.hardware.cores import MOST_CORES, num_cores, usable_cpus
from towers.hardware.cpu_instructions import cpu_instructions
from towers.hardware.gpus import gpu_of
from towers.quiet_stderr import stderr_aside

KINDS = ("auto", "cpu", "gpu")


def configure_devices(
    *,
    num_towers: int | None = None,
    kind: str = "auto",
    parameter_device: str = AUTOMATIC,
    threads_per_tower: int | None = None,
    num_processes: int = 1,
    batch_size: int | None = None,
    cores_per_tower: int = 1,
    zero: int = 0,
    offload: str = "",
    own_gpus: Sequence[int] | None = None,
    tf32: bool = True,
    deterministic: bool = False,
    max_cpu_isa: str = "",
) -> Devices:
    """Configures the devices of this process. Call it before TensorFlow computes anything.

    Each visible GPU becomes a tower (with memory growth, so that other programs can use the card too). With towers
    on CPUs this process starts no GPU. Without GPUs, each core becomes a logical CPU device and a tower, as long
    as each tower gets 32 examples of a batch. CPU towers share the cores evenly: with one tower for each core,
    each operation runs on one thread. That measured faster than one operation over all cores.

    Args:
      num_towers: None for one tower for each GPU, or for each core but at most one for each 32 examples.
      kind: 'cpu', 'gpu', or 'auto' for GPUs if there are any.
      parameter_device: 'cpu', 'cpu:K' or 'gpu:K', 'sharded' to give each parameter an owner among the towers'
        devices, 'replicated' for a copy on each tower's device; 'auto' for 'cpu', but a strategy with towers on
        GPUs chooses once it knows the model.
      threads_per_tower: None for cores / towers, or what TensorFlow has if it already runs.
      num_processes: number of processes that share this machine's cores, this one included.
      batch_size: examples of a batch that this process computes at once; None if it is not known yet. It only
        lowers the default number of towers.
      cores_per_tower: minimum number of cores of each CPU tower if `num_towers` is None.
      zero: the stage of ZeRO over the towers; 0 for none.
      offload: 'optimizer' for slots and updates on `parameter_device`, and a copy of the parameters on each
        tower's device.
      own_gpus: indices, among the GPUs that TensorFlow finds, of those that this process may use; None for all.
      tf32: whether GPUs compute products of float32 in TensorFloat-32: faster, with 10 bits of mantissa.
      deterministic: whether to use only operations that give the same bits each time, on GPUs too. TensorFlow
        replaces those that do not (the sums of embeddings' gradients among them), and an operation that it cannot
        replace is an error.
      max_cpu_isa: the value of ONEDNN_MAX_CPU_ISA in this process's environment; '' if it is not set.

    Raises:
      UserError: fewer GPUs than asked for, an unknown device, a number out of range, or TensorFlow already runs
        with other devices or threads.
    """
    _check_numbers(
        num_towers=num_towers,
        threads_per_tower=threads_per_tower,
        num_processes=num_processes,
        cores_per_tower=cores_per_tower,
    )
    _check_batch_size(batch_size)
    _check_parameter_device(parameter_device, zero=zero, offload=offload)
    gpus = _gpus_of_process(own_gpus)
    if kind not in KINDS:
        raise UserError(f"tower device {kind!r} is unknown: use one of {', '.join(KINDS)}")
    on_gpu = kind == "gpu" or (kind == "auto" and bool(gpus))
    _check_gpus(len(gpus), on_gpu, num_towers)
    cores = max(1, num_cores() // num_processes)
    count = num_towers or (len(gpus) if on_gpu else default_towers(cores, batch_size, cores_per_tower))
    threads = 0 if on_gpu else threads_per_tower or threads_for(count, cores)
    asked = "cpu" if parameter_device == AUTOMATIC else parameter_device
    own_device = ("gpu:0" if on_gpu else "cpu:0") if spread_by(asked, zero) else asked
    # Each visible GPU gets a context of some hundred MB, so those without a tower are hidden.
    gpus = gpus[: max(count, _parameter_gpu(own_device) + 1)] if on_gpu else []
    parameters = _parameter_device(own_device, num_cpus=1 if on_gpu else count, num_gpus=len(gpus))
    found_threads = _configure_runtime(gpus, num_cpus=1 if on_gpu else count, threads=threads, cores=cores)
    _check_threads(threads_per_tower, threads, found_threads)
    if zero == 3:
        _keep_gathers()
    _choose_kernels(tf32=tf32, deterministic=deterministic)
    towers = tuple(f"/device:{'GPU' if on_gpu else 'CPU'}:{index}" for index in range(count))
    return Devices(
        towers=towers,
        parameters=parameters,
        threads_per_tower=found_threads,
        default_of_cores=0 if on_gpu or num_towers is not None else cores,
        sharded=parameter_device == SHARDED,
        replicated=parameter_device == REPLICATED and not zero,
        zero=zero,
        offload=offload,
        gpus=tuple(gpu_of(gpu) for gpu in gpus[:count]),
        automatic=on_gpu and parameter_device == AUTOMATIC and not zero and not offload,
        tf32=tf32,
        deterministic=deterministic,
        cpu_instructions=cpu_instructions(max_cpu_isa),
        input_on_towers=on_gpu,
    )


def physical_gpus() -> list[tf.config.PhysicalDevice]:
    """The GPUs that TensorFlow finds; it starts none of them."""
    with stderr_aside():  # CUDA complains where there is no GPU
        return tf.config.list_physical_devices("GPU")


def lowest_compute_capability() -> tuple[int, int]:
    """The lowest compute capability of the visible GPUs; (0, 0) if one does not report it."""
    details = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return min((found.get("compute_capability", (0, 0)) for found in details), default=(0, 0))


# The parameter device of each stage of ZeRO.
_ZERO_DEVICES = {1: REPLICATED, 2: REPLICATED, 3: SHARDED}


def _check_numbers(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and not is_integer(number):
            raise UserError(f"{name}={number!r}: it must be an integer; omit it for the default")
        if number is not None and not 1 <= number <= MOST_CORES:
            raise UserError(
                f"{name}={number}: it must be at least 1 and at most {MOST_CORES}; omit it for the default"
            )


def _check_batch_size(batch_size: int | None) -> None:
    if batch_size is not None and not is_integer(batch_size):
        raise UserError(f"batch_size={batch_size!r}: it must be an integer; omit it if it is not known")


def _gpus_of_process(own_gpus: Sequence[int] | None) -> list[tf.config.PhysicalDevice]:
    """The GPUs whose indices are in `own_gpus`; all for None."""
    found = physical_gpus()
    if own_gpus is None:
        return found
    _check_own_gpus(own_gpus, len(found))
    return [found[index] for index in own_gpus]


def _check_own_gpus(own_gpus: Sequence[int], num_found: int) -> None:
    is_list = isinstance(own_gpus, Sequence) and not isinstance(own_gpus, str)
    if not is_list or not all(map(is_integer, own_gpus)):
        raise UserError(f"own_gpus={own_gpus!r}: it must be a list of indices; use for example own_gpus=[0]")
    if len(set(own_gpus)) < len(own_gpus):
        raise UserError(f"own_gpus={list(own_gpus)}: a GPU is given twice; give each once")
    for index in own_gpus:
        if not 0 <= index < num_found:
            raise UserError(
                f"own_gpus={list(own_gpus)}: TensorFlow finds {num_found} GPUs; their indices start at 0"
            )


def _check_parameter_device(parameter_device: str, *, zero: int, offload: str) -> None:
    if not isinstance(parameter_device, str):
        raise UserError(f"parameter_device={parameter_device!r}: it must be a text; use for example 'cpu'")
    _check_zero(zero, parameter_device)
    _check_offload(offload, zero, parameter_device)


def _check_zero(zero: int, parameter_device: str) -> None:
    if zero not in (0, *_ZERO_DEVICES):
        raise UserError(f"zero={zero}: use 1, 2 or 3, or 0 for none")
    if zero and parameter_device not in (AUTOMATIC, _ZERO_DEVICES[zero]):
        raise UserError(
            f"zero={zero} with parameter_device={parameter_device!r}: this stage of ZeRO has its parameters "
            f"{_ZERO_DEVICES[zero]}; omit parameter_device"
        )


def _check_offload(offload: str, zero: int, parameter_device: str) -> None:
    if offload not in ("", "optimizer"):
        raise UserError(f"offload={offload!r} is unknown: use 'optimizer', or omit it")
    on_cpu = parameter_device == AUTOMATIC or parameter_device.strip().lower().startswith("cpu")
    if offload and (zero or not on_cpu):
        other = f"zero={zero}" if zero else f"parameter_device={parameter_device!r}"
        raise UserError(
            f"offload='optimizer' with {other}: all optimizer state is then on a CPU; omit one of them"
        )


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
        raise UserError(
            f"parameter_device={text!r} is unknown: use {AUTOMATIC}, cpu, cpu:K, gpu:K, {SHARDED} or {REPLICATED}"
        )
    kind, index = match.group(1), int(match.group(2) or 0)
    present = {"cpu": num_cpus, "gpu": num_gpus}[kind]
    if index >= present:
        known = [f"cpu:{k}" for k in range(num_cpus)] + [f"gpu:{k}" for k in range(num_gpus)]
        raise UserError(f"parameter_device={text!r} does not exist: use one of {', '.join(known)}")
    return f"/device:{kind.upper()}:{index}"


def _parameter_gpu(text: str) -> int:
    """K of 'gpu:K'; -1 for anything else, which `_parameter_device` checks."""
    match = re.fullmatch(r"gpu:(\d+)", text.strip().lower())
    return -1 if match is None else int(match.group(1))


def _configure_runtime(gpus, *, num_cpus: int, threads: int, cores: int) -> int:
    """Sets logical devices, memory growth and threads. All of them can be set only before TensorFlow starts.

    Returns the number of threads of an operation on a CPU; 0 if `threads` is 0.
    """
    try:
        if tf.config.get_visible_devices("GPU") != gpus:
            # A GPU that is not visible gets no context, so it uses no memory.
            tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if threads:
            threads = _set_threads(threads, max(2, cores))
            _optimize_towers_alone()
        cpu = tf.config.list_physical_devices("CPU")[0]
        if len(tf.config.get_logical_device_configuration(cpu) or [None]) < num_cpus:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_cpus)
    except (RuntimeError, ValueError) as error:
        # TensorFlow's ValueError says that the program has divided a GPU itself.
        wanted = f"{len(gpus)} GPUs" if gpus else f"{num_cpus} logical CPU devices"
        raise UserError(
            f"{wanted}: TensorFlow already runs in this process with other devices, or they were divided before; "
            "configure the devices before the first tensor, and in one place"
        ) from error
    return threads


def _check_threads(asked: int | None, wanted: int, found: int) -> None:
    """Raises UserError if the user asked for a number of threads and TensorFlow already runs with another."""
    if asked and wanted != found:
        raise UserError(
            f"threads_per_tower={wanted}: TensorFlow already runs in this process with {found}; configure the "
            "devices before the first tensor, or omit it"
        )


def _choose_kernels(*, tf32: bool, deterministic: bool) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def _optimize_towers_alone() -> None:
    """Disables TensorFlow's graph optimizer: `towers.tracing` runs it on the tower, before the copies.

    The first step of eight ResNet-20 towers takes 2.2 s instead of 4, at the same speed afterwards; of one tower
    1.9 s either way.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _keep_gathers() -> None:
    """Disables TensorFlow's dependency optimizer, so that owners send parameters only when a tower needs them.

    That optimizer would replace an Identity on the owner, which waits for the tower, by a wait on the tower.
    """
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})


def _set_threads(threads: int, at_once: int) -> int:
    """Sets the intra-op (`threads`) and inter-op (`at_once`) number of threads; returns the intra-op number.

    If TensorFlow already runs, its own numbers stay.
    """
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(at_once)
    # Threads that wait without spinning (`disable_thread_spinning`) change nothing: ResNet-20 on two towers makes
    # 572, 624 and 600 images/s with them, 576, 535 and 633 without (AMD EPYC, Zen 3, in turn).
    # 0 is TensorFlow's default, one for each CPU.
    return tf.config.threading.get_intra_op_parallelism_threads() or len(usable_cpus())
