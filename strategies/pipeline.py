"""The strategy 'pipeline': a tower is several devices, each with a stage of the model or several."""

from collections.abc import Mapping

import tensorflow as tf

from strategies.grouped_towers import check_grouped
from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.engine import Engine
from towers.errors import UserError
from towers.grid import Grid
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.pipeline import grid
from towers.pipeline.schedule import Schedule
from towers.placement import canonical_names
from towers.sharded_placement import ShardedPlacement
from towers.shards import Shard
from towers.split import checked_shares
from towers.stages.model_stages import ModelStages, parameter_bytes
from towers.stages.options import PipelineOptions, check_microbatches
from towers.stages.pipeline_tower import PipelineEvaluation, PipelineTower
from towers.stages.staged_passes import StagedPasses
from towers.task import Task
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule

# A longer grid is not printed at the start of a run.
_WIDEST_GRID = 110


def pipeline_strategy(
    task: Task,
    devices: Devices,
    options: StepOptions,
    *,
    shares: tuple[float, ...] | None = None,
    pipeline: PipelineOptions | None = None,
) -> "PipelineStrategy":
    """Builds the strategy 'pipeline'; arguments as `strategies.registry.build_strategy`.

    Without groups in `devices`, all of them are one tower.

    Raises:
      UserError: the model can't be cut into these stages, the schedule does not fit them, the batch is too small,
        or an option that pipelines don't have.
    """
    devices = devices if devices.groups else devices.grouped((devices.towers,))
    pipeline = pipeline or PipelineOptions()
    schedule = pipeline.schedule_for(len(devices.groups[0]))
    of_towers = checked_shares(shares, devices.num_towers, "tower_shares")
    check_microbatches(task.batch_size, options.accumulation, schedule.num_microbatches, of_towers)
    _check_options(options, devices.num_towers)
    return PipelineStrategy(task, devices, options, shares, pipeline, schedule)


def _check_options(options: StepOptions, num_towers: int) -> None:
    check_grouped("pipeline", options)
    if options.batch_stats == "synced" and num_towers > 1:
        raise UserError(
            f"batch_stats='synced' with a pipeline of {num_towers} towers: each microbatch of a tower has its own "
            "statistics; use batch_stats='average'"
        )


class PipelineStrategy(SynchronousStrategy):
    """Implements `strategies.contract.Strategy`: towers of several devices in one process."""

    def __init__(
        self,
        task: Task,
        devices: Devices,
        options: StepOptions,
        shares: tuple[float, ...] | None,
        pipeline: PipelineOptions,
        schedule: Schedule,
    ):
        """Arguments as for `pipeline_strategy`, which checks them; `schedule` is that of each tower."""
        self._pipeline, self._schedule = pipeline, schedule
        self._stages: ModelStages
        num_passes = options.accumulation * schedule.num_microbatches * devices.num_towers
        num_examples = max(1, task.batch_size // num_passes)

        def make_engine(model, batch_spec):
            kernels = options.kernels(devices)
            with tf.device(devices.groups[0][0]):
                self._stages = stages = pipeline.stages_of(
                    model, schedule.num_stages, num_examples=num_examples, kernels=kernels
                )

            def place(variables: ModelVariables, rule: UpdateRule) -> ShardedPlacement:
                return ShardedPlacement(variables, rule, devices.groups[0], _shards(variables, stages, schedule))

            def make_towers(engine: Engine):
                passes = StagedPasses(task, model, stages, schedule, kernels, options.recompute)
                return (
                    [PipelineTower(passes, group) for group in devices.groups],
                    [PipelineEvaluation(passes, group) for group in devices.groups],
                )

            return OneProcessEngine(
                task,
                model,
                devices,
                options,
                batch_spec=batch_spec,
                shares=shares,
                place=place,
                make_towers=make_towers,
                microbatches=schedule.num_microbatches,
            )

        super().__init__("pipeline", task, options, make_engine, devices.num_towers)

    @property
    def microbatches(self) -> int:
        return self.options.accumulation * self._schedule.num_microbatches

    @property
    def notices(self) -> list[str]:
        return [*self._stage_lines(), *self._grid_lines(), *super().notices]

    def mode_settings(self) -> Mapping[str, object]:
        schedule, devices = self._pipeline.schedule, self.engine.devices
        return {
            "grid": str(Grid(data=devices.num_towers, stage=len(devices.groups[0]))),
            "stages": self._stages.num_stages,
            "microbatches": self._schedule.num_microbatches,
            "pipeline_schedule": schedule if isinstance(schedule, str) else "given",
        }

    def _stage_lines(self) -> list[str]:
        """A line for each stage: its operations, its parameters and its device in each tower."""
        lines, homes = [], self._schedule.stage_devices
        for stage, (nodes, size) in enumerate(zip(self._stages.nodes, parameter_bytes(self._stages), strict=True)):
            on = ", ".join(group[homes[stage]].removeprefix("/device:") for group in self.engine.devices.groups)
            first, last = nodes[0].operation.name, nodes[-1].operation.name
            named = first if len(nodes) == 1 else f"{first} to {last}"
            plural = "" if len(nodes) == 1 else "s"
            lines.append(
                f"stage {stage} on {on}: {len(nodes)} operation{plural}, {named}; {size:,} bytes of parameters"
            )
        return lines

    def _grid_lines(self) -> list[str]:
        drawn = grid.draw(self._schedule).splitlines()
        if max(map(len, drawn)) > _WIDEST_GRID:
            return [f"schedule of {self._schedule.num_microbatches} microbatches: {drawn[-1]}"]
        return drawn


def _shards(variables: ModelVariables, stages: ModelStages, schedule: Schedule) -> list[Shard]:
    """Each parameter whole on the device of the first stage that reads it."""
    names = canonical_names(variables.parameters)
    homes = schedule.stage_devices
    return [
        Shard(name, homes[stages.stages_of(variable)[0]])
        for name, variable in zip(names, variables.parameters, strict=True)
    ]
