"""How long each layer of a pipeline takes, from the traced operations of its actions; used to cut other stages.

    tower_0/action_1B3/PartitionedCall/gradient_tape/transformer_1/block_3_1/mlp_up_1/MatMul      layer block_3_1

Operations of no layer (the loss, what the model itself computes) count with the last layer of their stage.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from towers.pipeline.action import Kind
from towers.pipeline.timeline import StageSeconds
from towers.timeline.activities import activity_of
from towers.timeline.operations import TracedOperation

_IN_ACTION = re.compile(r"/action_\d+[FBW]\d+(?:_\d+)?/")
# Scopes between the action and the model.
_CALLS = re.compile(r"(?:(?:Stateful)?PartitionedCall(?:_\d+)?|gradient_tape|backward_pass(?:_\d+)?)/")
_TWO_SCOPES = re.compile(r"([^/]+)/([^/]+)/")


def layer_seconds(operations: Iterable[TracedOperation], stages: Sequence[StageSeconds]) -> list[StageSeconds]:
    """[layers] the seconds of each layer for a microbatch, in the order of the forward pass.

    The time of each pass of a stage is divided in proportion to the layers' operation times, so operations that
    run in parallel count less than their duration.

    Args:
      operations: operations of the traced steps.
      stages: [stages] their measured seconds.
    """
    busy = [collections.defaultdict(lambda: dict.fromkeys(Kind, 0.0)) for _ in stages]
    begins: list[dict[str, float]] = [{} for _ in stages]
    in_actions = [(activity_of(one.name).action, one, _scopes_of(one.name)) for one in operations]
    models = collections.Counter(scopes[0] for action, _, scopes in in_actions if action is not None and scopes)
    model = max(models, key=models.get, default="")
    for action, one, scopes in in_actions:
        if action is None:
            continue
        layer = scopes[1] if scopes and scopes[0] == model else ""
        busy[action.stage][layer][action.kind] += one.end_seconds - one.start_seconds
        if action.kind is Kind.FORWARD:
            earlier = begins[action.stage].get(layer, math.inf)
            begins[action.stage][layer] = min(earlier, one.start_seconds)
    return [
        layer
        for own, begin, stage in zip(busy, begins, stages, strict=True)
        for layer in _of_stage(own, begin, stage)
    ]


def _scopes_of(name: str) -> tuple[str, str] | None:
    """The two outermost scopes of an operation within its action; for a layer, the model and the layer."""
    in_action = _IN_ACTION.split(name, maxsplit=1)[-1]
    found = _TWO_SCOPES.match(_CALLS.sub("", in_action))
    return found.groups() if found else None


def _of_stage(
    busy: Mapping[str, Mapping[Kind, float]], begins: Mapping[str, float], stage: StageSeconds
) -> list[StageSeconds]:
    """The seconds of a stage's layers, in order; at least one."""
    names = sorted((name for name in busy if name), key=lambda name: begins.get(name, math.inf)) or [""]
    found = {name: dict(busy.get(name, dict.fromkeys(Kind, 0.0))) for name in names}
    if names[-1]:
        for kind, seconds in busy.get("", {}).items():
            found[names[-1]][kind] += seconds
    totals = {kind: sum(of_layer[kind] for of_layer in found.values()) for kind in Kind}

    def share(of_layer: Mapping[Kind, float], kind: Kind) -> float:
        """The layer's share of the stage's time in this pass; equal shares if no operation of it was traced."""
        whole = stage.of(kind, is_split=True)
        return whole * of_layer[kind] / totals[kind] if totals[kind] else whole / len(found)

    return [StageSeconds(*(share(of_layer, kind) for kind in Kind)) for of_layer in found.values()]
