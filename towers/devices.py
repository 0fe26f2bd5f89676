"""Which devices the towers and the parameters live on, and how many threads each tower gets.

Only this file and `device_setup.py` distinguish CPUs and GPUs. All others use device names.
"""

import dataclasses

from towers.errors import UserError
from towers.hardware.gpus import Gpu

# Parameter device: chosen by the number of GPUs and the model's size; without GPUs the first CPU.
AUTOMATIC = "auto"
# Parameter device: each parameter has an owner among the towers' devices.
SHARDED = "sharded"
# Parameter device: each tower's device has a copy of every parameter.
REPLICATED = "replicated"
# Batches come from the host's memory: they are sliced there and each part is sent to its tower.
HOST = "/device:CPU:0"
# The default number of CPU towers leaves each at least this many examples of a batch. With fewer, batch statistics
# are noisy, and the results of a model with batch norm would depend on the number of cores more than necessary.
EXAMPLES_PER_TOWER = 32
# A tower of t threads computes t**0.84 times as much as one of one thread: ResNet-20 on two cores of an Intel Xeon
# with AMX, 804 images/s in one tower of two threads, 899 in two towers. More threads were not measured.
_GAIN_OF_THREADS = 0.84


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one process, by TensorFlow's names ('/device:CPU:0').

    Attributes:
      towers: the device of each tower; several towers may share one.
      parameters: the device of the parameters, the update and its slots; if they are sharded, that of the rest.
      threads_per_tower: number of threads for one operation of a tower; 0 for TensorFlow's own choice.
      default_of_cores: the number of cores if the user did not set the number of CPU towers; else 0. Small batches
        then get fewer towers.
      lowered_from: the number of towers before a small batch lowered it; 0 if it did not.
      sharded: whether each parameter, with its update and its slots, is on one of the towers' devices.
      replicated: whether each of the towers' devices has a copy of the parameters and of the slots.
      zero: the stage of ZeRO over the towers; 0 for none.
      offload: 'optimizer' if `parameters` has the slots and makes the update, and each tower's device has a copy
        of the parameters; otherwise ''.
      groups: the devices of each tower if a tower has several, from `towers.grid.Grid.groups`. `towers` are then
        the first of each.
      gpus: the GPUs of the towers, in the order of their device names; () on CPUs.
      automatic: whether a strategy that can choose the parameter device does so; the other strategies use
        `parameters`.
      reason: why this parameter device was chosen automatically; '' if it was not.
      masks: whether masks, not conditionals, skip an update; None to decide it by the parameter device.
      packed_copies: whether tensors are sent from one device to another in packs (`towers.packed_copies`); None to
        decide it by the devices.
      tf32: whether GPUs compute products of float32 in TensorFloat-32.
      deterministic: whether only operations run that give the same bits each time.
      cpu_instructions: CPU instructions that kernels may use, from `towers.hardware.cpu_instructions`.
      compiles_kernels: whether XLA may compile kernels of layers.
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
    compiles_kernels: bool = True
    input_on_towers: bool = False

    def masked(self, updating: str) -> bool:
        """Whether masks (`towers.parameters.permission`) skip an update on a device, instead of a conditional.

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
        """The name and value of the argument that puts parameters or slots on the towers' devices; '' for none."""
        spread = SHARDED if self.sharded else REPLICATED if self.replicated else ""
        return spread_by(spread, self.zero, self.offload)

    @property
    def settings(self) -> dict[str, object]:
        """Where parameters and slots are, by the names of arguments."""
        where = SHARDED if self.sharded else REPLICATED if self.replicated else _short(self.parameters)
        return {"parameter_device": where, "zero": self.zero, "offload": self.offload}

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
        """The parameter device that was chosen automatically: 'cpu:0', 'gpu:0' or 'replicated'; '' if none was."""
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
        """Only the first towers, if the user did not set their number and a pass over `num_examples` needs fewer.

        The number of threads can no longer change, so as many towers as possible remain.
        """
        count = most_towers(self.default_of_cores, num_examples)
        if not self.default_of_cores or count >= self.num_towers:
            return self
        return dataclasses.replace(self, towers=self.towers[:count], lowered_from=self.num_towers)

    def grouped(self, groups: tuple[tuple[str, ...], ...]) -> "Devices":
        """The same devices in groups, one for each tower: see `towers.grid.Grid.groups`.

        Raises:
          UserError: groups of unequal sizes, or a device that is unknown or twice in them.
        """
        self._check_groups(groups)
        towers = tuple(group[0] for group in groups)
        # Parameters and updates are on the devices of the groups; only scalars meet on this device.
        parameters = towers[0] if is_gpu(towers[0]) else self.parameters
        return dataclasses.replace(
            self, towers=towers, parameters=parameters, groups=groups, default_of_cores=0, lowered_from=0
        )

    def _check_groups(self, groups: tuple[tuple[str, ...], ...]) -> None:
        named = [device for group in groups for device in group]
        is_equal = bool(named) and len({len(group) for group in groups}) == 1
        if not is_equal or len(set(named)) < len(named) or not set(named) <= set(self.towers):
            raise UserError(
                f"groups={groups}: must be one or more groups of as many devices each, every one once and of "
                f"{', '.join(self.towers)}; use for example Grid(data=2, stage=2).groups(devices.towers)"
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
        count, cores = self.num_towers, self.default_of_cores
        better = default_towers(cores, count * EXAMPLES_PER_TOWER)
        threads = threads_for(better, cores)
        advice = f"; num_towers={better} gives each {threads} threads" if threads > 1 else ""
        return [
            f"{count} tower{'' if count == 1 else 's'} instead of {self.lowered_from}, so that each computes at "
            f"least {EXAMPLES_PER_TOWER} examples of a batch{advice}"
        ]


def is_gpu(device: str) -> bool:
    """Whether a device, by TensorFlow's name, is a GPU."""
    return ":GPU:" in device.upper()


def _short(device: str) -> str:
    return device.removeprefix("/device:").lower()


def spread_by(parameter_device: str, zero: int, offload: str = "") -> str:
    """The argument, as text, that puts parameters or slots on the towers' devices; '' for none."""
    if offload:
        return f"offload={offload!r}"
    if zero:
        return f"zero={zero}"
    return f"parameter_device={parameter_device!r}" if parameter_device in (SHARDED, REPLICATED) else ""


def most_towers(cores: int, num_examples: int) -> int:
    """The largest number of CPU towers with a core and EXAMPLES_PER_TOWER examples each; at least 1."""
    return max(1, min(cores, num_examples // EXAMPLES_PER_TOWER))


def default_towers(cores: int, num_examples: int | None = None, cores_per_tower: int = 1) -> int:
    """Default number of CPU towers: the one with the highest estimated total speed.

    Six cores train a batch of 128 in three towers of two threads: a fourth tower would leave each one thread, and
    two cores idle.

    Args:
      cores: number of cores that this process may use.
      num_examples: number of examples that the towers compute at once; None if it is not known yet.
      cores_per_tower: the fewest cores that a tower gets, unless there are fewer.
    """
    most = max(1, cores // cores_per_tower)
    most = most if num_examples is None else most_towers(most, num_examples)
    return max(range(most, 0, -1), key=lambda count: count * threads_for(count, cores) ** _GAIN_OF_THREADS)


def threads_for(num_towers: int, cores: int) -> int:
    """Number of threads for one operation of each CPU tower, so that the towers use all cores."""
    return max(1, cores // num_towers)
