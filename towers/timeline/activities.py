"""Finds by an operation's name what it belongs to: a tower, a pass, or the end of the step.

Steps are traced in these name scopes. TensorFlow keeps them when it inlines and optimizes the graph:

    tower_1/PartitionedCall/dense/MatMul                         forward, of tower 1
    tower_1/PartitionedCall/gradient_tape/dense/MatMul/MatMul    backward
    tower_0/action_1B3/PartitionedCall/...                       a pipeline: backward, microbatch 3, stage 1
    exchange/AddN, update/ResourceApplyMomentum                  where gradients meet, and where they are applied
"""

import dataclasses
import enum
import functools
import re

from towers.pipeline.action import Action, Kind

EXCHANGE_SCOPE, UPDATE_SCOPE, BACKWARD_SCOPE = "exchange", "update", "backward_pass"
# Suffix of the names of operations that the backward pass computes again.
RECOMPUTED_SUFFIX = "_recomputed"

_TOWER = re.compile(r"(?:^|/)tower_(\d+)(?:_\d+)?/")
_ACTION = re.compile(r"/action_(\d+)([FBW])(\d+)(?:_\d+)?/")
_BACKWARD = re.compile(rf"(?:gradient_tape|{BACKWARD_SCOPE}(?:_\d+)?)/")
_END = re.compile(rf"(?:^|/)({EXCHANGE_SCOPE}|{UPDATE_SCOPE})(?:_\d+)?/")


class Work(enum.StrEnum):
    """The kinds of work of a device."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradients"
    RECOMPUTED = "computed again"
    EXCHANGE = "exchange of gradients"
    UPDATE = "update"
    INPUT = "reading the batch"
    OTHER = "other"


_OF_KIND = {Kind.FORWARD: Work.FORWARD, Kind.BACKWARD: Work.BACKWARD, Kind.WEIGHTS: Work.WEIGHTS}


@dataclasses.dataclass(frozen=True)
class Activity:
    """The activity that an operation belongs to.

    Attributes:
      work: the kind of work.
      tower: index of the tower; None outside of towers.
      action: the action of a pipeline's schedule; None in other towers.
    """

    work: Work
    tower: int | None = None
    action: Action | None = None


def tower_scope(tower: int) -> str:
    """The name scope of a tower's operations."""
    return f"tower_{tower}"


def action_scope(action: Action) -> str:
    """The name scope of a pipeline's action."""
    return f"action_{action}"


@functools.lru_cache(maxsize=1 << 16)
def activity_of(name: str) -> Activity:
    """The activity of the operation with this name."""
    of_tower, of_action, end = _TOWER.search(name), _ACTION.search(name), _END.search(name)
    tower = int(of_tower.group(1)) if of_tower else None
    if of_action is not None:
        stage, kind, microbatch = of_action.groups()
        action = Action(Kind(kind), int(stage), int(microbatch))
        return Activity(_OF_KIND[action.kind], tower, action)
    if end is not None or tower is None:
        return Activity(_OF_SCOPE[end.group(1)] if end else Work.OTHER)
    if RECOMPUTED_SUFFIX in name:
        return Activity(Work.RECOMPUTED, tower)
    return Activity(Work.BACKWARD if _BACKWARD.search(name) else Work.FORWARD, tower)


_OF_SCOPE = {EXCHANGE_SCOPE: Work.EXCHANGE, UPDATE_SCOPE: Work.UPDATE}
