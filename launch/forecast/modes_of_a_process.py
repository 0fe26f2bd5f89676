"""The modes that one process runs, and the graphs of their steps."""

import dataclasses
import functools

from strategies.registry import build_strategy
from strategies.slices import SliceOptions
from strategies.synchronous import SynchronousStrategy
from towers.branches.options import BranchOptions
from towers.devices import HOST, Devices, threads_for
from towers.hardware.cores import num_cores
from towers.memory.engine_memory import EngineMemory, StepMemory
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.task import Task

TOWERS, PIPELINE, SLICES, BRANCHES = "towers", "pipeline", "slices", "branches"
# The axis of the grid along which each mode divides a tower.
AXES = {PIPELINE: "stage", SLICES: "slice", BRANCHES: "branch"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessMode:
    """A mode of one process, on the first of its devices.

    Attributes:
      name: name of the mode, for the user.
      num_devices: how many of the process's devices it uses.
      strategy: TOWERS, or for one tower over all devices PIPELINE, SLICES or BRANCHES.
      num_towers: number of towers of several devices; unused with TOWERS, where each device is a tower.
      sharded, replicated, zero, offload: see `towers.devices.Devices`.
      recompute: what the backward pass recomputes; None for the policy of the options.
    """

    name: str
    num_devices: int
    strategy: str = TOWERS
    num_towers: int = 1
    sharded: bool = False
    replicated: bool = False
    zero: int = 0
    offload: str = ""
    recompute: str | None = None

    def devices(self, of_process: Devices) -> Devices:
        """The devices of the mode."""
        used = all_devices(of_process)[: self.num_devices]
        grouped = self.strategy != TOWERS
        size = self.num_devices // self.num_towers
        groups = tuple(used[first : first + size] for first in range(0, len(used), size)) if grouped else ()
        is_spread = self.sharded or self.replicated or bool(self.zero)
        return dataclasses.replace(
            of_process,
            towers=tuple(group[0] for group in groups) if grouped else used,
            parameters=(used[0] if not of_process.on_cpu else HOST) if is_spread else of_process.parameters,
            default_of_cores=0,
            threads_per_tower=self._threads(of_process),
            lowered_from=0,
            sharded=self.sharded,
            replicated=self.replicated,
            zero=self.zero,
            offload=self.offload,
            groups=groups,
            automatic=False,
            reason="",
        )

    def _threads(self, of_process: Devices) -> int:
        """Threads of an operation: the process's number; if that is the default, the default for `num_devices`."""
        count, threads = len(all_devices(of_process)), of_process.threads_per_tower
        is_default = threads == threads_for(count, num_cores())
        return threads_for(self.num_devices, num_cores()) if is_default else threads

    def flags(self, of_process: Devices) -> list[str]:
        """The flags that choose the mode in a fresh process with the same devices."""
        if self.strategy != TOWERS:
            size = self.num_devices // self.num_towers
            return [f"--strategy={self.strategy}", f"--grid=data:{self.num_towers},{AXES[self.strategy]}:{size}"]
        spread = "sharded" if self.sharded else "replicated" if self.replicated else ""
        spread = spread or of_process.parameters.removeprefix("/device:").lower()
        found = [f"--strategy={TOWERS}", f"--num_towers={self.num_devices}", f"--zero={self.zero}"]
        found += [f"--parameter_device={spread}"] * (not self.zero) + [f"--offload={self.offload}"]
        return found + [f"--recompute={self.recompute}"] * (self.recompute is not None)


def all_devices(devices: Devices) -> tuple[str, ...]:
    """All devices on which a process computes, whether each is a tower or not."""
    return tuple(one for group in devices.groups for one in group) or devices.towers


@dataclasses.dataclass(frozen=True)
class ProcessModes:
    """Builds the modes of one process, each once.

    Attributes:
      task: the task, which gives model and batch.
      devices: all devices of the process.
      options: options of a step.
      pipeline, slices, branches: options for a tower that is divided over several devices.
      tower_shares: relative sizes of the towers' parts of a batch, for modes with as many towers; None for equal
        parts.
    """

    task: Task
    devices: Devices
    options: StepOptions
    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)
    slices: SliceOptions = dataclasses.field(default_factory=SliceOptions)
    branches: BranchOptions = dataclasses.field(default_factory=BranchOptions)
    tower_shares: tuple[float, ...] | None = None

    def shares(self, mode: ProcessMode) -> tuple[float, ...] | None:
        """The `tower_shares` if the mode has as many towers; else None."""
        count = mode.devices(self.devices).num_towers
        return self.tower_shares if self.tower_shares and len(self.tower_shares) == count else None

    @functools.cache  # noqa: B019  the modes live as long as the program
    def strategy(self, mode: ProcessMode) -> SynchronousStrategy:
        """The mode's strategy.

        Raises:
          UserError: the mode refuses the model, the batch or an option.
        """
        devices = mode.devices(self.devices)
        options = self.options
        if mode.recompute is not None:
            options = dataclasses.replace(options, recompute=mode.recompute)
        of_tower = {PIPELINE: self.pipeline, SLICES: self.slices, BRANCHES: self.branches}
        return build_strategy(
            mode.strategy,
            self.task,
            devices,
            options,
            # Given, so that a small batch does not lower the number of towers.
            shares=self.shares(mode)
            or (None if mode.strategy in (SLICES, BRANCHES) else (1.0,) * devices.num_towers),
            **{name: given for name, given in of_tower.items() if name == mode.strategy},
        )

    @functools.cache  # noqa: B019
    def memory(self, mode: ProcessMode) -> EngineMemory:
        """What a step of the mode needs. Raises UserError as `strategy`."""
        return EngineMemory(self.strategy(mode).engine)

    def process_or_gpu(self, mode: ProcessMode, length: int) -> StepMemory:
        """Memory for a batch of `length`: of the process if its towers are on CPUs, else of the fullest GPU."""
        memory = self.memory(mode)
        if self.devices.on_cpu:
            return memory.in_all(length)
        return max(memory.by_device(length).values(), key=lambda one: one.total_bytes)

    def multiple(self, mode: ProcessMode) -> int:
        """Number of parts into which a step divides a batch: a multiple of it gives equal parts."""
        devices = mode.devices(self.devices)
        if mode.strategy != PIPELINE:
            return devices.num_towers * self.options.accumulation
        microbatches = self.pipeline.schedule_for(len(devices.groups[0])).num_microbatches
        return devices.num_towers * self.options.accumulation * microbatches
