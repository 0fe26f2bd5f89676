"""The schedules that have names: GPipe, 1F1B, interleaved 1F1B and ZB-H1.

In the drawings a forward pass and each half of a backward pass take one slot, so a backward pass that is not
split takes two (B0 ==).
"""

from collections.abc import Callable

from towers.errors import UserError
from towers.pipeline.action import Action, Kind
from towers.pipeline.schedule import Schedule

INTERLEAVED = "interleaved"


def build(name: str, *, num_devices: int, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of this name. Stage i is on device i % num_devices.

    Raises:
      UserError: the name is unknown, or the numbers do not fit it.
    """
    if min(num_devices, num_stages, num_microbatches) < 1:
        raise UserError(
            f"{num_devices} devices, {num_stages} stages and {num_microbatches} microbatches: each is at least 1; "
            "give larger numbers"
        )
    if name in _ONE_STAGE_A_DEVICE:
        _check_one_stage_a_device(name, num_devices, num_stages)
        return _ONE_STAGE_A_DEVICE[name](num_stages, num_microbatches)
    if name in _SEVERAL_STAGES_A_DEVICE:
        _check_even_stages(name, num_devices, num_stages)
        return _SEVERAL_STAGES_A_DEVICE[name](num_devices, num_stages, num_microbatches)
    raise UserError(f"schedule={name}: the schedules are {', '.join(NAMES)}; give one of them or a CSV file")


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).

    The backward pass takes the microbatches in reverse order, as in the paper's figure 2c.

        device 0  F0 F1 F2 F3  .  .  .  .  .  . B3 == B2 == B1 == B0 ==
        device 1   . F0 F1 F2 F3  .  .  . B3 == B2 == B1 == B0 ==  .  .
        device 2   .  . F0 F1 F2 F3 B3 == B2 == B1 == B0 ==  .  .  .  .
    """
    return Schedule(
        tuple(
            (
                *_passes(Kind.FORWARD, stage, num_microbatches),
                *_passes(Kind.BACKWARD, stage, num_microbatches)[::-1],
            )
            for stage in range(num_stages)
        )
    )


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: forward and backward passes alternate as soon as backward passes can run.

    This is PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503). Stage i holds min(stages - i, microbatches)
    microbatches; each of GPipe's stages holds all of them.

        device 0  F0 F1 F2  .  .  .  . B0 == F3 B1 ==  . B2 ==  . B3 ==
        device 1   . F0 F1  .  . B0 == F2 B1 == F3 B2 ==  . B3 ==  .  .
        device 2   .  . F0 B0 == F1 B1 == F2 B2 == F3 B3 ==  .  .  .  .
    """
    return Schedule(
        tuple(
            _alternated(
                _passes(Kind.FORWARD, stage, num_microbatches),
                _passes(Kind.BACKWARD, stage, num_microbatches),
                num_first=num_stages - 1 - stage,
            )
            for stage in range(num_stages)
        )
    )


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with the gradients of parameters computed later (ZB-H1, Qi et al. 2023, arXiv 2401.10241, section 2.1).

    On stage i these gradients are i microbatches late. So a stage waits less for the next stage, the last stages
    compute them while 1F1B would wait for the end, and each stage holds as many microbatches as the first stage.
    The split backward pass costs CPU time: a step of the transformer takes 176 ms, with other schedules 156 and
    164 (batch 64, 8 microbatches, two devices, AMD EPYC, Zen 4). On stage 0, for whose gradients of inputs nobody
    waits, B is empty and W the whole backward pass.

        device 0  F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3
        device 1   . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        device 2   .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    unsplit = one_forward_one_backward(num_stages, num_microbatches)
    return Schedule(
        tuple(_with_late_weights(actions, num_late=stage) for stage, actions in enumerate(unsplit.devices))
    )


def interleaved(num_devices: int, num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with several stages a device (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Device d has the stages d, d + devices, d + 2 * devices and so on. A group of as many microbatches as there are
    devices passes the device's first stage, then its second one. With v stages per device, each stage takes 1/v of
    the time, and so does the bubble.

        device 0  0F0 0F1 2F0 2F1   .   . 2B0  ==   . 2B1  == 0B0  == 0B1  ==
        device 1    . 1F0 1F1 3F0 3B0  == 3F1 3B1  == 1B0  == 1B1  ==   .   .

    If the number of devices does not divide that of microbatches, it is the schedule of the next multiple, without
    the surplus microbatches. (Groups of several sizes can deadlock: 4 devices, 12 stages, 5 microbatches.)
    """
    num_groups = -(-num_microbatches // num_devices)
    groups = [range(group * num_devices, (group + 1) * num_devices) for group in range(num_groups)]
    devices = []
    for device in range(num_devices):
        stages = range(device, num_stages, num_devices)
        forward = [Action(Kind.FORWARD, stage, index) for group in groups for stage in stages for index in group]
        backward = [
            Action(Kind.BACKWARD, stage, index)
            for group in groups
            for stage in reversed(stages)
            for index in group
        ]
        num_first = 2 * (num_devices - 1 - device) + (len(stages) - 1) * num_devices
        actions = _alternated(forward, backward, num_first)
        devices.append(tuple(action for action in actions if action.microbatch < num_microbatches))
    return Schedule(tuple(devices))


# Functions of (stages, microbatches), and of (devices, stages, microbatches).
_ONE_STAGE_A_DEVICE: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb_h1": zb_h1,
}
_SEVERAL_STAGES_A_DEVICE: dict[str, Callable[[int, int, int], Schedule]] = {INTERLEAVED: interleaved}
NAMES = (*_ONE_STAGE_A_DEVICE, *_SEVERAL_STAGES_A_DEVICE)


def _check_one_stage_a_device(name: str, num_devices: int, num_stages: int) -> None:
    if num_stages != num_devices:
        several = ", or schedule=interleaved for several stages on each device"
        raise UserError(
            f"schedule={name} with {num_stages} stages on {num_devices} devices: it has one stage on each device; "
            f"use stages={num_devices}{several if num_stages % num_devices == 0 else ''}"
        )


def _check_even_stages(name: str, num_devices: int, num_stages: int) -> None:
    if num_stages % num_devices:
        raise UserError(
            f"schedule={name} with {num_stages} stages on {num_devices} devices: every device has the same number "
            f"of stages; use stages={num_stages + -num_stages % num_devices}"
        )


def _passes(kind: Kind, stage: int, num_microbatches: int) -> list[Action]:
    return [Action(kind, stage, index) for index in range(num_microbatches)]


def _alternated(forward: list[Action], backward: list[Action], num_first: int) -> tuple[Action, ...]:
    """`num_first` forward passes, then a forward and a backward pass in turn, then the other backward passes."""
    num_first = min(num_first, len(forward))
    num_pairs = len(forward) - num_first
    pairs = zip(forward[num_first:], backward[:num_pairs], strict=True)
    return (*forward[:num_first], *(action for pair in pairs for action in pair), *backward[num_pairs:])


def _with_late_weights(actions: tuple[Action, ...], num_late: int) -> tuple[Action, ...]:
    """The actions, with W of microbatch k - num_late after B of microbatch k, and the other Ws at the end."""
    backward = [action for action in actions if action.kind is Kind.BACKWARD]
    weights = [Action(Kind.WEIGHTS, action.stage, action.microbatch) for action in backward]
    follower = dict(zip(backward[num_late:], weights, strict=False))
    found = []
    for action in actions:
        found.append(action)
        if action in follower:
            found.append(follower[action])
    return (*found, *weights[len(follower) :])
