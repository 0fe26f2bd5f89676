"""The strategy 'pipeline': a tower is several devices, each with one or several stages of the model."""

from collections.abc import Mapping

import tensorflow as tf

from strategies.grouped_towers import GroupedStrategy, check_grouped, decided_here, traced_towers
from towers.devices import Devices
from towers.engine import Engine
from towers.errors import UserError
from towers.gathering.exchange import UnitExchange
from towers.grid import STAGE, Grid
from towers.options import StepOptions
from towers.parameters.placement import canonical_names
from towers.parameters.shards import Shard
from towers.pipeline import grid
from towers.split import checked_shares, even_shares, fewest_examples
from towers.stages.gathered_pipeline import GatheredPipeline, GatheredPipelineEvaluation
from towers.stages.model_stages import ModelStages, cut_by_parameters, cut_by_sizes, parameter_bytes
from towers.stages.options import TIME, PipelineOptions, check_microbatches
from towers.stages.pipeline_tower import PipelineEvaluation, PipelineTower
from towers.stages.staged_passes import StagedPasses
from towers.task import Task

# A wider grid is not printed at the start of a run.
_WIDEST_GRID = 110


def pipeline_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    pipeline: PipelineOptions | None = None,
) -> GroupedStrategy:
    """Builds the strategy 'pipeline'; arguments as `strategies.registry.build_strategy`.

    Without groups in `devices`, all of them are one tower.

    Raises:
      UserError: the model can't be cut into these stages, the schedule does not fit them, the batch is too small,
        or an option is not supported for pipelines.
    """
    towers = StagedTowers(task, devices, options, pipeline)
    of_towers = checked_shares(shares, towers.devices.num_towers, "tower_shares")
    towers.check(of_towers)
    return GroupedStrategy(task, options, towers, shares=shares)


class StagedTowers:
    """Implements `strategies.grouped_towers.GroupedTowers`: each device of a tower has stages of the model.

    Attributes:
      options: stages and schedule.
      stages: the stages of the model; set once it is divided.
    """

    name = "pipeline"
    axis = STAGE
    stages: ModelStages

    def __init__(self, task: Task, devices: Devices, options: StepOptions, pipeline: PipelineOptions | None):
        """Args:
        task, options: what is trained, and how.
        devices: its groups are the towers; without groups, all devices are one tower.
        pipeline: stages and schedule; None for the defaults.

        Raises:
          UserError: the schedule does not fit the devices, or an option is not supported for pipelines.
        """
        self.devices = devices if devices.groups else devices.grouped((devices.towers,))
        self._task, self._step, self.options = task, options, pipeline or PipelineOptions()
        self._schedule = self.options.schedule_for(len(self.devices.groups[0]))
        self._shares = even_shares(self.devices.num_towers)
        check_grouped(options)

    @property
    def microbatches(self) -> int:
        return self._schedule.num_microbatches

    def check(self, shares: tuple[float, ...]) -> None:
        """Checks what depends on the towers of all processes.

        Args:
          shares: shares of all towers.

        Raises:
          UserError: a tower would get no example of some microbatch, or batch statistics are over parts of a
            batch.
        """
        self._shares = shares
        by_default = self.options.microbatches is None and isinstance(self.options.schedule, str)
        check_microbatches(
            self._task.batch_size,
            self._step.accumulation,
            self.microbatches,
            shares,
            num_own=self.devices.num_towers,
            by_default=by_default,
        )
        if self._step.batch_stats == "synced" and len(shares) > 1:
            raise UserError(
                f"batch_stats='synced' with a pipeline of {len(shares)} towers: each microbatch of a tower has "
                "its own statistics; use batch_stats='average'"
            )

    def divide(self, model, decided=decided_here):
        num_passes = self._step.accumulation * self.microbatches
        num_examples = fewest_examples(self._task.batch_size, num_passes, self._shares)
        kernels = self._step.kernels(self.devices, num_examples)

        def cut() -> ModelStages:
            with tf.device(self.devices.groups[0][0]):
                return self.options.stages_of(
                    model, self._schedule.num_stages, num_examples=num_examples, kernels=kernels
                )

        if self.options.balance == TIME:
            # Measured times differ between processes, so one decides; but all of them refuse a model that can't be
            # cut.
            cut_by_parameters(model, self._schedule.num_stages)
            self.stages = cut_by_sizes(model, decided(lambda: [len(nodes) for nodes in cut().nodes]))
        else:
            self.stages = cut()

    def shards(self, variables):
        """Each parameter whole on the device of the first stage that reads it."""
        names = canonical_names(variables.parameters)
        homes = self._schedule.stage_devices
        return [
            Shard(name, homes[self.stages.stages_of(variable)[0]])
            for name, variable in zip(names, variables.parameters, strict=True)
        ]

    def make_towers(self, engine: Engine, exchange: UnitExchange | None = None):
        def passes(kernels) -> StagedPasses:
            return StagedPasses(
                self._task,
                engine.tower.model,
                self.stages,
                self._schedule,
                kernels,
                self._step.recompute,
                engine.batch_spec,
            )

        trained, evaluated = passes(engine.kernels), passes(engine.evaluation_kernels)
        towers, evaluations = [], []
        for group, of_training, of_evaluation in traced_towers(self.devices, exchange):
            if self.devices.zero == 3:
                towers.append(GatheredPipeline(trained, group, **of_training))
                evaluations.append(GatheredPipelineEvaluation(evaluated, group, **of_evaluation))
            else:
                towers.append(PipelineTower(trained, group))
                evaluations.append(PipelineEvaluation(evaluated, group))
        return towers, evaluations

    @property
    def settings(self) -> Mapping[str, object]:
        schedule = self.options.schedule
        return {
            "grid": str(Grid(data=self.devices.num_towers, stage=len(self.devices.groups[0]))),
            "stages": self._schedule.num_stages,
            "microbatches": self.microbatches,
            "pipeline_schedule": schedule if isinstance(schedule, str) else "given",
        }

    @property
    def notices(self) -> list[str]:
        return [*self._stage_lines(), *self._grid_lines()]

    def _stage_lines(self) -> list[str]:
        """A line for each stage: its operations, its parameters and its device in each tower."""
        lines, homes = [], self._schedule.stage_devices
        for stage, (nodes, size) in enumerate(zip(self.stages.nodes, parameter_bytes(self.stages), strict=True)):
            on = ", ".join(group[homes[stage]].removeprefix("/device:") for group in self.devices.groups)
            first, last = nodes[0].operation.name, nodes[-1].operation.name
            named = first if len(nodes) == 1 else f"{first} to {last}"
            plural = "" if len(nodes) == 1 else "s"
            lines.append(
                f"stage {stage} on {on}: {len(nodes)} operation{plural}, {named}; {size:,} bytes of parameters"
            )
        return lines

    def _grid_lines(self) -> list[str]:
        drawn = grid.drawn_within(self._schedule, _WIDEST_GRID)
        if len(drawn) > 1:
            return drawn
        return [f"schedule of {self.microbatches} microbatches, too long to draw: {drawn[0]}"]
