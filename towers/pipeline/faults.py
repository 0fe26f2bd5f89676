"""What is wrong with a schedule: actions missing, repeated, misplaced or out of order, too many microbatches."""

import dataclasses
import itertools
from collections.abc import Iterator

from towers.errors import UserError
from towers.pipeline.action import Action, Kind
from towers.pipeline.alive import alive_counts
from towers.pipeline.schedule import Schedule
from towers.pipeline.timeline import EQUAL_SECONDS, play

# Largest number of missing actions reported: one typing error in a file may leave thousands missing.
_MOST_MISSING = 20


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      device: index of its device; None if a stage is on no device.
      position: the index of the wrong action on the device; None if an action is missing.
      message: the value, the rule and the fix.
    """

    device: int | None
    position: int | None
    message: str


def check(schedule: Schedule, max_alive: int | None = None) -> None:
    """Checks that a schedule can be run.

    Raises:
      UserError: `find_faults` finds a fault. The message is that of the first one.
    """
    found = find_faults(schedule, max_alive)
    if found:
        where = "schedule" if found[0].device is None else f"schedule, device {found[0].device}"
        raise UserError(f"{where}: {found[0].message}{and_others(found)}")


def and_others(found: list[Fault]) -> str:
    """The end of the first fault's message, if there are other faults."""
    return " (and other faults)" if len(found) > 1 else ""


def find_faults(schedule: Schedule, max_alive: int | None = None) -> list[Fault]:
    """All faults of a schedule. If the list is empty, the schedule can be run.

    Args:
      schedule: what to check.
      max_alive: the largest number of microbatches that a device may hold (`alive.alive_counts`); None for any.
    """
    missing = itertools.islice(_missing(schedule), _MOST_MISSING)
    found = [*_repeated(schedule), *_misplaced(schedule), *missing, *_out_of_order(schedule)]
    # Each of these faults stops other devices too, so waiting devices are reported only without them.
    found = found or list(_waiting_forever(schedule))
    return found + ([] if max_alive is None else list(_over_limit(schedule, max_alive)))


def _each(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """(device, position, action) of all actions."""
    for device, actions in enumerate(schedule.devices):
        for position, action in enumerate(actions):
            yield device, position, action


def _repeated(schedule: Schedule) -> Iterator[Fault]:
    seen: set[Action] = set()
    for device, position, action in _each(schedule):
        if action in seen:
            yield Fault(
                device,
                position,
                f"{schedule.label(action)} comes a second time: every action comes once; remove one of them",
            )
        seen.add(action)


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    for device, position, action in _each(schedule):
        home = schedule.stage_devices[action.stage]
        if home != device:
            yield Fault(
                device,
                position,
                f"{schedule.label(action)} belongs to stage {action.stage}, which has actions on device {home}: "
                f"a stage is on one device; move the action to device {home}",
            )


def _missing(schedule: Schedule) -> Iterator[Fault]:
    present = {action for _, _, action in _each(schedule)}
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    kinds = " and ".join([", ".join(schedule.kinds[:-1]), schedule.kinds[-1]])
    for stage in stages:
        if stage not in schedule.stage_devices:
            yield Fault(
                None, None, f"stage {stage} has no action: there are stages 0 to {stages[-1]}; add its actions"
            )
            continue
        for action in (Action(kind, stage, index) for index in microbatches for kind in schedule.kinds):
            if action not in present:
                yield Fault(
                    schedule.stage_devices[stage],
                    None,
                    f"{schedule.label(action)} is missing: microbatches count from 0, and every stage has {kinds} "
                    f"of microbatches 0 to {microbatches[-1]}; add it",
                )


def _out_of_order(schedule: Schedule) -> Iterator[Fault]:
    """Actions that come before one that they need, on the same device."""
    for device, actions in enumerate(schedule.devices):
        present, seen = set(actions), set()
        for position, action in enumerate(actions):
            seen.add(action)
            for need in action.needs(schedule.num_stages):
                if need in present and need not in seen:
                    label, needed = schedule.label(action), schedule.label(need)
                    yield Fault(device, position, f"{label} stands before {needed}, which it needs: swap them")


def _waiting_forever(schedule: Schedule) -> Iterator[Fault]:
    """The devices that can never continue: what they wait for comes after an action that waits too."""
    played = play(schedule, lambda stage: EQUAL_SECONDS)
    done = {timed.action for actions in played.devices for timed in actions}
    heads = {
        device: (len(played.devices[device]), actions[len(played.devices[device])])
        for device, actions in enumerate(schedule.devices)
        if len(played.devices[device]) < len(actions)
    }
    for device, (position, action) in heads.items():
        need = next(need for need in action.needs(schedule.num_stages) if need not in done)
        home = schedule.stage_devices[need.stage]
        blocking = heads[home][1]
        if blocking != need:
            label, needed, other = map(schedule.label, (action, need, blocking))
            yield Fault(
                device,
                position,
                f"{label} waits forever for {needed} of device {home}, which stands behind {other} there, "
                f"and {other} waits too: move {needed} before it",
            )


def _over_limit(schedule: Schedule, max_alive: int) -> Iterator[Fault]:
    last_kind = schedule.kinds[-1]
    for device, actions in enumerate(schedule.devices):
        for position, count in enumerate(alive_counts(schedule, device)):
            action = actions[position]
            if action.kind is Kind.FORWARD and count > max_alive:
                yield Fault(
                    device,
                    position,
                    f"{schedule.label(action)} makes {count} microbatches alive: the limit is {max_alive}; "
                    f"move a {last_kind} before it",
                )
