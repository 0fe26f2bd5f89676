"""How a tower of several devices is organised: stages, microbatches and their schedule."""

import dataclasses

import keras

from towers import split
from towers.errors import UserError, is_integer
from towers.layers.kernels import DEFAULT_KERNELS, LayerKernels
from towers.pipeline import builders, faults
from towers.pipeline.schedule import Schedule
from towers.stages.model_stages import ModelStages, cut_by_costs, cut_by_parameters, cut_by_sizes, functional_of
from towers.stages.operation_seconds import operation_seconds

PARAMETERS, TIME = "parameters", "time"
BALANCES = (PARAMETERS, TIME)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options of a pipeline.

    Attributes:
      stages: number of stages; None for one per device of a tower, or for those of a given schedule.
      microbatches: number of microbatches; None for twice the stages, or for those of a given schedule.
      schedule: the order of the passes: a name in `towers.pipeline.builders.NAMES`, or a schedule.
      balance: where the model is cut: 'parameters' for stages with equally many parameters, 'time' for stages that
        take equally long, or a sequence with the number of operations of each stage.

    Raises:
      UserError: an option is unknown, out of range or of another type.
    """

    stages: int | None = None
    microbatches: int | None = None
    schedule: str | Schedule = "1f1b"
    balance: str | tuple[int, ...] = PARAMETERS

    def __post_init__(self):
        for name in ("stages", "microbatches"):
            value = getattr(self, name)
            if value is not None and not is_integer(value):
                raise UserError(f"{name}={value!r}: must be an integer; use for example {name}=4")
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: it must be at least 1")
        if not isinstance(self.schedule, str | Schedule):
            raise UserError(
                f"schedule={self.schedule!r}: must be one of {', '.join(builders.NAMES)}, or a "
                "towers.pipeline.schedule.Schedule; use for example schedule='1f1b'"
            )
        is_known = self.balance in BALANCES if isinstance(self.balance, str) else _are_sizes(self.balance)
        if not is_known:
            raise UserError(
                f"balance={self.balance!r} is unknown: use one of {', '.join(BALANCES)}, or a number of "
                "operations for each stage, as 5,3"
            )

    def schedule_for(self, num_devices: int) -> Schedule:
        """The schedule of a tower of this many devices.

        Raises:
          UserError: the schedule does not fit the devices, the stages or the microbatches, or has a fault.
        """
        if isinstance(self.schedule, str):
            stages = self.stages or num_devices
            if self.schedule == builders.INTERLEAVED and stages == num_devices:
                raise UserError(
                    f"schedule={self.schedule} with {stages} stages on {num_devices} devices: with one stage on "
                    f"each it interleaves nothing; use stages={2 * stages} with grid='stage:{num_devices}', or "
                    "schedule=1f1b"
                )
            return builders.build(
                self.schedule,
                num_devices=num_devices,
                num_stages=stages,
                num_microbatches=self.microbatches or 2 * stages,
            )
        faults.check(self.schedule)
        for name in ("stages", "microbatches"):
            asked, found = getattr(self, name), getattr(self.schedule, f"num_{name}")
            if asked not in (None, found):
                raise UserError(f"{name}={asked}: the given schedule has {found} {name}; omit {name}")
        if num_devices != len(self.schedule.devices):
            raise UserError(
                f"the given schedule is for {len(self.schedule.devices)} devices, and a tower has {num_devices}: "
                f"give the grid stage:{len(self.schedule.devices)}, or another schedule"
            )
        return self.schedule

    def stages_of(
        self,
        model: keras.Model,
        num_stages: int,
        *,
        num_examples: int = 1,
        kernels: LayerKernels = DEFAULT_KERNELS,
    ) -> ModelStages:
        """The stages of a model.

        Args:
          model: a built template.
          num_stages: number of stages.
          num_examples: examples of a microbatch, for a measurement on the current device.
          kernels: which layers use other kernels than Keras's, for a measurement.

        Raises:
          UserError: the model can't be cut, or not into this many stages.
        """
        if self.balance == PARAMETERS:
            return cut_by_parameters(model, num_stages)
        if self.balance == TIME:
            functional = functional_of(model)
            return cut_by_costs(functional, operation_seconds(functional, num_examples, kernels), num_stages)
        if len(self.balance) != num_stages:
            raise UserError(
                f"balance={','.join(map(str, self.balance))}: {len(self.balance)} "
                f"number{'' if len(self.balance) == 1 else 's'} for {num_stages} stages: give one number of "
                "operations for each stage"
            )
        return cut_by_sizes(model, self.balance)


def _are_sizes(balance) -> bool:
    return isinstance(balance, tuple | list) and all(map(is_integer, balance))


def check_microbatches(
    batch_size: int,
    accumulation: int,
    microbatches: int,
    shares: tuple[float, ...],
    *,
    num_own: int | None = None,
    by_default: bool = False,
) -> None:
    """Checks that a full batch has an example for every tower in each microbatch of its pipeline.

    Args:
      batch_size, accumulation: number of examples of a batch, and of parts that it is divided into first.
      microbatches: number of microbatches.
      shares: relative number of examples of each tower, over all processes.
      num_own: number of towers of this process; None for all.
      by_default: whether `microbatches` is a default that the user did not choose.

    Raises:
      UserError: some microbatch would be empty.
    """
    smallest = min(split.sizes(batch_size, split.even_shares(accumulation)))

    def is_enough(number: int) -> bool:
        return min(split.sizes(smallest // number, shares)) > 0

    if not is_enough(microbatches):
        of_what = "batch" if accumulation == 1 else f"microbatch (accumulation={accumulation})"
        most = next(filter(is_enough, range(min(microbatches, smallest), 0, -1)), None)
        fewer = f"use microbatches={most} or less, or" if most else "use"
        count = len(shares)
        towers = f"num_towers={count}" if num_own in (None, count) else f"{count} towers in all processes"
        raise UserError(
            f"microbatches={microbatches}{' (by default, twice the stages)' if by_default else ''}, "
            f"{towers} and a {of_what} of {smallest}: each tower "
            f"needs an example of each microbatch; {fewer} a larger batch"
        )
