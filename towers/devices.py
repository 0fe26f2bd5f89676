"""Which devices the towers and the parameters live on, and how many threads each tower gets.

Only this file distinguishes CPUs and GPUs. All others use device names.
"""

import dataclasses
import re
from collections.abc import Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.hardware.cores import num_cores
from towers.hardware.cpu_instructions import cpu_instructions
from towers.hardware.gpus import Gpu, gpu_of
from towers.quiet_stderr import stderr_aside

KINDS = ("auto", "cpu", "gpu")
# The parameter device that is chosen by the number of GPUs and the model's size; without GPUs the first CPU.
AUTOMATIC = "auto"
# The parameter device of an owner among the towers for each parameter.
SHARDED = "sharded"
# The parameter device of a copy of every parameter on each tower's device.
REPLICATED = "replicated"
# Batches come from the host's memory: they are sliced there and each part is sent to its tower.
HOST = "/device:CPU:0"
# The default number of CPU towers leaves each at least this many examples of a batch. With fewer, batch statistics
# are noisy, and a model with batch norm would depend on the number of cores more than it need.
EXAMPLES_PER_TOWER = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one process, by TensorFlow's names ('/device:CPU:0').

    Attributes:
      towers: the device of each tower; several towers may share one.
      parameters: the device of the parameters, the update and its slots; if they are sharded, that of the rest.
      threads_per_tower: number of threads for one operation of a tower; 0 for TensorFlow's own choice.
      default_of_cores: the number of cores, if nobody set the number of CPU towers; else 0. Small batches then get
        fewer towers.
      lowered_from: the number of towers before a small batch lowered it; 0 if it did not.
      sharded: whether each parameter, with its update and its slots, is on one of the towers' devices.
      replicated: whether each of the towers' devices has a copy of the parameters and of the slots.
      zero: the stage of ZeRO over the towers; 0 for none.
      offload: 'optimizer' if `parameters` has the slots and makes the update, and each tower's device has a copy
        of the parameters; otherwise ''.
      groups: the devices of each tower if a tower has several, from `towers.grid.Grid.groups`. `towers` are then
        the first of each.
      gpus: the GPUs of the towers, in the order of their device names; () on CPUs.
      automatic: whether a strategy that can choose where parameters are does so; `parameters` is for others.
      reason: why the parameters are where they are, if it was chosen so; otherwise ''.
      masks: whether masks leave out an update; None to decide it by the device of the parameters.
      packed_copies: whether tensors are sent from one device to another in packs (`towers.packed_copies`); None to
        decide it by the devices.
      tf32: whether GPUs compute products of float32 in TensorFloat-32.
      deterministic: whether operations run that give the same bits each time.
      cpu_instructions: those of `towers.hardware.cpu_instructions` that kernels may use.
      input_on_towers: whether each tower's part of a batch is copied to its device one step ahead, and prepared
        there (`placed_input` and `unprepared` in `towers.input`). On CPUs the host prepares batches, and a step
        cuts them.
    """

    towers: tuple[str, ...]
    parameters: str
    threads_per_tower: int = 0
    default_of_cores: int = 0
    lowered_from: int = 0
    sharded: bool = False
    replicated: bool = False
    zero: int = 0
    offload: str = ""
    groups: tuple[tuple[str, ...], ...] = ()
    gpus: tuple[Gpu, ...] = ()
    automatic: bool = False
    reason: str = ""
    masks: bool | None = None
    packed_copies: bool | None = None
    tf32: bool = True
    deterministic: bool = False
    cpu_instructions: frozenset[str] = frozenset()
    input_on_towers: bool = False

    def masked(self, updating: str) -> bool:
        """Whether masks (`towers.parameters.permission`) leave out an update on a device, and not a conditional.

        A GPU would wait for a conditional in every step. On CPUs masks take longer.
        """
        return is_gpu(updating) if self.masks is None else self.masks

    def packed(self, source: str, target: str) -> bool:
        """Whether tensors are sent from a device to another in packs: between GPUs, where each copy has a cost.

        On CPUs packing has nothing to gain (sending takes 1.3 of the 327 ms of a step).
        """
        between_gpus = is_gpu(source) and is_gpu(target)
        return source != target and (between_gpus if self.packed_copies is None else self.packed_copies)

    @property
    def num_towers(self) -> int:
        return len(self.towers)

    @property
    def spread(self) -> str:
        """The argument that puts parameters or slots on the towers' devices; '' if none does."""
        spread = SHARDED if self.sharded else REPLICATED if self.replicated else ""
        return spread_by(spread, self.zero, self.offload)

    @property
    def on_cpu(self) -> bool:
        """Whether the towers run on CPUs."""
        return all("CPU" in tower for tower in self.towers)

    @property
    def described(self) -> str:
        """A line for the user: '2 towers on cpu:0 and cpu:1'; GPUs with their models and compute capabilities."""
        names = [_short(name) for group in self.groups or ((name,) for name in self.towers) for name in group]
        listed = f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)
        models = dict.fromkeys(gpu.described for gpu in self.gpus)
        return f"{self.num_towers} tower{'' if self.num_towers == 1 else 's'} on {listed}" + "".join(
            f" ({model})" for model in models
        )

    @property
    def choice(self) -> str:
        """Where the parameters were chosen to be: 'cpu:0', 'gpu:0' or 'replicated'; '' if nobody had to choose."""
        return (REPLICATED if self.replicated else _short(self.parameters)) if self.reason else ""

    def placed(self, parameter_device: str, reason: str) -> "Devices":
        """The same devices with the parameters as chosen.

        Args:
          parameter_device: 'cpu', 'gpu:0' or 'replicated'.
          reason: a sentence for the user.
        """
        is_copied = parameter_device == REPLICATED
        on_gpu = is_copied or parameter_device.startswith("gpu")
        return dataclasses.replace(
            self,
            parameters=self.towers[0] if on_gpu else HOST,
            replicated=is_copied,
            automatic=False,
            reason=reason,
        )

    def for_examples(self, num_examples: int) -> "Devices":
        """The first towers only, if nobody set their number and a pass over `num_examples` needs fewer."""
        count = default_towers(self.default_of_cores, num_examples)
        if not self.default_of_cores or count >= self.num_towers:
            return self
        return dataclasses.replace(self, towers=self.towers[:count], lowered_from=self.num_towers)

    def grouped(self, groups: tuple[tuple[str, ...], ...]) -> "Devices":
        """The same devices as groups, each a tower: see `towers.grid.Grid.groups`."""
        towers = tuple(group[0] for group in groups)
        # Their parameters and updates are on the devices of the groups; only scalars meet here.
        parameters = towers[0] if is_gpu(towers[0]) else self.parameters
        return dataclasses.replace(
            self, towers=towers, parameters=parameters, groups=groups, default_of_cores=0, lowered_from=0
        )

    @property
    def notices(self) -> list[str]:
        """Lines for the user: where parameters were chosen to be, kernels, and whether cores are idle."""
        where = "copied to each GPU" if self.replicated else f"on {self.choice}"
        chosen = [f"parameters {where}: {self.reason}"] if self.reason else []
        return [*chosen, *self._notices_of_kernels(), *self._notices_of_cores()]

    def _notices_of_kernels(self) -> list[str]:
        found = []
        if any(is_gpu(device) for device in (*self.towers, self.parameters)):
            products = "TensorFloat-32 (10 bits of mantissa)" if self.tf32 else "float32, not in TensorFloat-32"
            other = "tf32=False computes them in float32" if self.tf32 else "tf32=True is faster"
            found.append(f"GPUs compute products of float32 in {products}; {other}")
        if self.deterministic:
            found.append("deterministic: operations give the same bits each time, some of them slower")
        return found

    def _notices_of_cores(self) -> list[str]:
        if not self.lowered_from:
            return []
        count, threads = self.num_towers, self.default_of_cores // self.num_towers
        plural = "" if count == 1 else "s"
        return [
            f"{count} tower{plural} instead of {self.lowered_from}, so that each computes at least "
            f"{EXAMPLES_PER_TOWER} examples of a batch; num_towers={count} gives each {threads} threads"
        ]


def is_gpu(device: str) -> bool:
    """Whether a device, by TensorFlow's name, is a GPU."""
    return ":GPU:" in device.upper()


def _short(device: str) -> str:
    return device.removeprefix("/device:").lower()


def spread_by(parameter_device: str, zero: int, offload: str = "") -> str:
    """The argument that puts parameters or slots on the towers' devices; '' if none of these does."""
    if offload:
        return f"offload={offload!r}"
    if zero:
        return f"zero={zero}"
    return f"parameter_device={parameter_device!r}" if parameter_device in (SHARDED, REPLICATED) else ""


def default_towers(cores: int, num_examples: int | None = None) -> int:
    """Number of CPU towers if nobody set it.

    Args:
      cores: number of cores that this process may use.
      num_examples: number of examples that the towers compute at once; None if it is not known yet.
    """
    return cores if num_examples is None else max(1, min(cores, num_examples // EXAMPLES_PER_TOWER))


def threads_for(num_towers: int, cores: int) -> int:
    """Number of threads for one operation of each CPU tower, so that the towers use all cores."""
    return max(1, cores // num_towers)


def configure_devices(
    *,
    num_towers: int | None = None,
    kind: str = "auto",
    parameter_device: str = AUTOMATIC,
    threads_per_tower: int | None = None,
    num_processes: int = 1,
    batch_size: int | None = None,
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
      parameter_device: 'cpu', 'cpu:K' or 'gpu:K', 'sharded' for an owner among the towers' devices for each,
        'replicated' for a copy on each tower's device; 'auto' for 'cpu', except that a strategy of towers on GPUs
        chooses, when it knows the model.
      threads_per_tower: None for cores / towers.
      num_processes: number of processes that share this machine's cores, this one included.
      batch_size: examples of a batch that this process computes at once; None if it is not known yet. It only
        lowers the default number of towers.
      zero: the stage of ZeRO over the towers; 0 for none.
      offload: 'optimizer' for slots and updates on `parameter_device`, and a copy of the parameters on each
        tower's device.
      own_gpus: which of the GPUs that TensorFlow finds are this process's own, by index; None for all.
      tf32: whether GPUs compute products of float32 in TensorFloat-32: faster, with 10 bits of mantissa.
      deterministic: whether to use only operations that give the same bits each time, on GPUs too. TensorFlow
        replaces those that do not (the sums of embeddings' gradients among them), and an operation that it cannot
        replace is an error.
      max_cpu_isa: the value of ONEDNN_MAX_CPU_ISA in this process's environment; '' if it is not set.

    Raises:
      UserError: fewer GPUs than asked for, an unknown device, or TensorFlow already runs with other devices.
    """
    found = physical_gpus()
    gpus = found if own_gpus is None else [found[index] for index in own_gpus]
    if kind not in KINDS:
        raise UserError(f"tower device {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if num_towers is not None and num_towers < 1:
        raise UserError(f"num_towers={num_towers}: it must be at least 1; omit it for a tower on every device")
    _check_zero(zero, parameter_device)
    _check_offload(offload, zero, parameter_device)
    on_gpu = kind == "gpu" or (kind == "auto" and bool(gpus))
    _check_gpus(len(gpus), on_gpu, num_towers)
    cores = max(1, num_cores() // num_processes)
    count = num_towers or (len(gpus) if on_gpu else default_towers(cores, batch_size))
    threads = 0 if on_gpu else threads_per_tower or threads_for(count, cores)
    asked = "cpu" if parameter_device == AUTOMATIC else parameter_device
    own_device = ("gpu:0" if on_gpu else "cpu:0") if spread_by(asked, zero) else asked
    gpus = gpus if on_gpu else []
    parameters = _parameter_device(own_device, num_cpus=1 if on_gpu else count, num_gpus=len(gpus))
    _configure_runtime(gpus, num_cpus=1 if on_gpu else count, threads=threads, cores=cores)
    if zero == 3:
        _keep_gathers()
    _choose_kernels(tf32=tf32, deterministic=deterministic)
    towers = tuple(f"/device:{'GPU' if on_gpu else 'CPU'}:{index}" for index in range(count))
    default_of_cores = 0 if on_gpu or num_towers is not None else cores
    return Devices(
        towers=towers,
        parameters=parameters,
        threads_per_tower=threads,
        default_of_cores=default_of_cores,
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
    """The lowest compute capability of the visible GPUs; (0, 0) if one does not tell it."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return min((found.get("compute_capability", (0, 0)) for found in details), default=(0, 0))


# Where each stage of ZeRO has the parameters.
_ZERO_DEVICES = {1: REPLICATED, 2: REPLICATED, 3: SHARDED}


def _check_zero(zero: int, parameter_device: str) -> None:
    if zero not in (0, *_ZERO_DEVICES):
        raise UserError(f"zero={zero}: use 1, 2 or 3, or 0 for none")
    if zero and parameter_device not in (AUTOMATIC, "cpu", _ZERO_DEVICES[zero]):
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
            f"parameter device {text!r} is unknown: use {AUTOMATIC}, cpu, cpu:K, gpu:K, {SHARDED} or {REPLICATED}"
        )
    kind, index = match.group(1), int(match.group(2) or 0)
    present = {"cpu": num_cpus, "gpu": num_gpus}[kind]
    if index >= present:
        known = [f"cpu:{k}" for k in range(num_cpus)] + [f"gpu:{k}" for k in range(num_gpus)]
        raise UserError(f"parameter device {text!r} does not exist: use one of {', '.join(known)}")
    return f"/device:{kind.upper()}:{index}"


def _configure_runtime(gpus, *, num_cpus: int, threads: int, cores: int) -> None:
    """Sets logical devices, memory growth and threads. All of them can be set only before TensorFlow starts."""
    try:
        if tf.config.get_visible_devices("GPU") != gpus:
            # Those that are not visible get no context, so no memory.
            tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if threads:
            _set_threads(threads, max(2, cores))
            _optimize_towers_alone()
        cpu = tf.config.list_physical_devices("CPU")[0]
        if len(tf.config.get_logical_device_configuration(cpu) or [None]) < num_cpus:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_cpus)
    except RuntimeError as error:
        raise UserError(
            f"{num_cpus} logical CPU devices: TensorFlow already runs in this process with other devices; "
            "configure the devices before the first tensor"
        ) from error


def _choose_kernels(*, tf32: bool, deterministic: bool) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def _optimize_towers_alone() -> None:
    """Disables TensorFlow's graph optimizer: `towers.traced_once` runs it on the tower, before the copies.

    The first step of eight ResNet-20 towers takes 2.2 s instead of 4, at the same speed afterwards; of one tower
    1.9 s either way.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _keep_gathers() -> None:
    """Keeps TensorFlow's optimizer of dependencies from sending parameters before a tower waits for them.

    It would replace an Identity on the owner, which waits for the tower, by a wait on the tower.
    """
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})


def _set_threads(threads: int, at_once: int) -> None:
    """Sets the numbers of threads of an operation, and of operations at once.

    If TensorFlow already runs, its own numbers stay.
    """
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(at_once)
    except RuntimeError:
        pass
