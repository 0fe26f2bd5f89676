"""A schedule: for each device of a pipeline the list of its actions, in order. It holds no times."""

import collections
import dataclasses
import functools

from towers.pipeline.action import Action, Kind


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of all devices.

    Nothing is checked here, so that a wrong schedule can be drawn: see `faults.check`.

    Attributes:
      devices: [devices] the actions of each device, in the order in which the device takes them.
    """

    devices: tuple[tuple[Action, ...], ...]

    @functools.cached_property
    def num_stages(self) -> int:
        return 1 + max((action.stage for actions in self.devices for action in actions), default=-1)

    @functools.cached_property
    def num_microbatches(self) -> int:
        return 1 + max((action.microbatch for actions in self.devices for action in actions), default=-1)

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether the gradients of parameters have actions of their own."""
        return any(action.kind is Kind.WEIGHTS for actions in self.devices for action in actions)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of passes that each microbatch makes through each stage, in order."""
        return tuple(Kind) if self.is_split else (Kind.FORWARD, Kind.BACKWARD)

    @functools.cached_property
    def stage_devices(self) -> dict[int, int]:
        """The device of each stage: the one with most of its actions; actions elsewhere are misplaced."""
        counts = collections.Counter(
            (action.stage, device) for device, actions in enumerate(self.devices) for action in actions
        )
        # Of equal counts the first device's is taken.
        most = {stage: device for (stage, device), _ in reversed(counts.most_common())}
        return {action.stage: most[action.stage] for actions in self.devices for action in actions}

    @functools.cached_property
    def has_one_stage_a_device(self) -> bool:
        """Whether stage i is on device i for all i, so that actions need not name their stage."""
        return all(action.stage == device for device, actions in enumerate(self.devices) for action in actions)

    def label(self, action: Action) -> str:
        """The action as written in a file or a grid: 'F3', or '1F3' if devices have several stages."""
        return action.short if self.has_one_stage_a_device else str(action)
