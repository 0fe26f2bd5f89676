"""How many microbatches a device of a pipeline keeps between their passes, and how many bytes."""

import dataclasses
from collections.abc import Sequence

from towers.pipeline.action import Action, Kind
from towers.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """What one stage keeps of one microbatch.

    Attributes:
      for_backward_bytes: the activations, kept from the forward pass to the end of the backward pass.
      for_weights_bytes: in a split schedule, layers' inputs and the gradients of their outputs, kept from the
        backward pass to the gradients of parameters.
    """

    for_backward_bytes: int
    for_weights_bytes: int = 0


def alive_counts(schedule: Schedule, device: int) -> list[int]:
    """[actions] how many microbatches are alive on the device while it takes each of its actions.

    A microbatch is alive from its forward pass through a stage to its last backward pass there. It counts once for
    each stage in which it is alive.
    """
    counts, alive = [], 0
    for action in schedule.devices[device]:
        if action.kind is Kind.FORWARD:
            alive += 1
        counts.append(alive)
        if action.kind is schedule.kinds[-1]:
            alive -= 1
    return counts


def peak_alive(schedule: Schedule) -> tuple[int, ...]:
    """[devices] the largest number of microbatches that are alive at once."""
    return tuple(max(alive_counts(schedule, device), default=0) for device in range(len(schedule.devices)))


def peak_bytes(schedule: Schedule, stages: Sequence[KeptBytes]) -> tuple[int, ...]:
    """[devices] the largest number of bytes that microbatches keep at once.

    Args:
      schedule: its order decides what is kept at once.
      stages: [stages] what each stage keeps of a microbatch.
    """
    return tuple(_peak_bytes(actions, schedule.is_split, stages) for actions in schedule.devices)


def _peak_bytes(actions: Sequence[Action], is_split: bool, stages: Sequence[KeptBytes]) -> int:
    kept = peak = 0
    for action in actions:
        stage = stages[action.stage]
        if action.kind is Kind.FORWARD:
            kept += stage.for_backward_bytes
        elif action.kind is Kind.WEIGHTS:
            kept -= stage.for_weights_bytes
        else:
            kept += stage.for_weights_bytes * is_split - stage.for_backward_bytes
        peak = max(peak, kept)
    return peak
