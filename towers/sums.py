"""Sums of the results of several towers or microbatches. Nothing is divided here."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from towers.task import WeightedValue
from towers.tower import EvaluationResult, TowerResult


def add_metrics(per_tower: Sequence[Mapping[str, WeightedValue]]) -> dict[str, WeightedValue]:
    """The sums of the towers' metrics, by name."""
    return {
        name: WeightedValue(*(tf.add_n([metrics[name][field] for metrics in per_tower]) for field in (0, 1)))
        for name in per_tower[0]
    }


def add_evaluations(per_tower: Sequence[EvaluationResult]) -> EvaluationResult:
    """The sums of the towers' evaluations."""
    return EvaluationResult(
        tf.add_n([result.loss_sum for result in per_tower]),
        tf.add_n([result.weight for result in per_tower]),
        add_metrics([result.metric_sums for result in per_tower]),
    )


def add_results(
    results: Sequence[TowerResult], sum_gradients: Callable, *, new_state: Mapping[int, tf.Tensor]
) -> TowerResult:
    """The sums of several results.

    Args:
      results: results of towers or microbatches.
      sum_gradients: takes a list of gradients for each result, returns a list of their sums.
      new_state: the state of the sum. State is not added; `towers.batch_stats` combines it.
    """
    return TowerResult(
        tf.add_n([result.loss_sum for result in results]),
        tf.add_n([result.weight for result in results]),
        sum_gradients([result.gradients for result in results]),
        dict(new_state),
        add_metrics([result.metric_sums for result in results]),
    )


def add_to(sums: TowerResult, result: TowerResult, sum_gradients: Callable) -> TowerResult:
    """`sums` plus the result of the next microbatch; the new state is that of the next microbatch."""
    return add_results([sums, result], sum_gradients, new_state=result.new_state)


def scalars_of(result: TowerResult) -> list[tf.Tensor]:
    """All scalar sums of a result, in a fixed order, the weight first; for an exchange that sums them."""
    return [result.weight, result.loss_sum, *(part for value in result.metric_sums.values() for part in value)]


def with_scalars(result: TowerResult, scalars: Sequence[tf.Tensor]) -> TowerResult:
    """`result` with its scalar sums replaced by `scalars`, which are in the order of `scalars_of`."""
    weight, loss_sum, *metrics = scalars
    pairs = zip(metrics[::2], metrics[1::2], strict=True)
    values = (WeightedValue(*pair) for pair in pairs)
    return result._replace(
        loss_sum=loss_sum, weight=weight, metric_sums=dict(zip(result.metric_sums, values, strict=True))
    )
