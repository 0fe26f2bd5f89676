"""Pipeline towers whose devices gather the parameters of their stages unit by unit (stage 3 of ZeRO).

    CPU:0   gather unit 0, 1   F0: unit 0, gather 2 ...   F1: ...   B0: ...     units of stage 0 alone
    CPU:1   gather unit 0, 1             F0: unit 0, gather 2 ...   B0: ...     units of stage 1 alone

All actions of a tower are one graph, so a device gathers the first units of an action during the action before.
The pieces are imported into the graph: a function call would need its whole parameters before it begins. Dead
operations are removed first, because a gather that waits for them would make them run.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.gathering.gathered_once import GatheredOnce
from towers.stages.pipeline_tower import PipelineEvaluation, PipelineTower
from towers.stages.staged_passes import StagedPasses
from towers.task import Batch
from towers.tower import EvaluationResult, TowerResult


class GatheredPipeline:
    """The training pass of a tower. Called as `PipelineTower`, with parameters that may be `Slices`.

    Attributes:
      traced: makes the tower's graphs.
    """

    def __init__(
        self,
        passes: StagedPasses,
        devices: Sequence[str],
        **gathering,
    ):
        """Args:
        passes, devices: as for `PipelineTower`.
        gathering: `exchange`, `others` and `graph`, as for `GatheredOnce`.
        """
        self._tower, self._parameters = PipelineTower(passes, devices, inlined=True), passes.variables.parameters
        self.traced = GatheredOnce(self._train, devices=devices, is_optimized=True, **gathering)

    @property
    def decays(self) -> Sequence[float | None]:
        """As in `PipelineTower`."""
        return self._tower.decays

    def __call__(self, parameters, state, parts: Sequence[Batch], seeds, gains) -> TowerResult:
        result = self.traced(list(parameters), list(state), list(seeds), list(gains), *parts)
        for gradient, variable in zip(result.gradients, self._parameters, strict=True):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)
        return result

    def _train(self, parameters, state, seeds, gains, *parts):
        return self._tower(parameters, state, parts, seeds, gains)


class GatheredPipelineEvaluation:
    """The evaluation pass of a tower. Called as `PipelineEvaluation`, with parameters that may be `Slices`."""

    def __init__(self, passes: StagedPasses, devices: Sequence[str], **gathering):
        """As for `GatheredPipeline`."""
        evaluation = PipelineEvaluation(passes, devices, inlined=True)
        self.traced = GatheredOnce(evaluation.__call__, devices=devices, is_optimized=True, **gathering)

    def __call__(self, parameters, state, batch: Batch, gain) -> EvaluationResult:
        return self.traced(list(parameters), list(state), batch, gain)
