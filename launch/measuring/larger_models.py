"""The rows of the groups for models that are larger than a device: pipelines, divided parameters, recomputation.

On CPUs each device has one thread, so that a row with twice the devices has twice the cores.
"""

import dataclasses

from launch.measuring.case import Case, own_case, work_of_flags
from strategies.engines import OWN
from towers.pipeline import builders
from towers.recompute.segments import POLICIES
from towers.timeline.pipeline_run import equal_bubble

_DEVICES, _MICROBATCHES = 2, 8
_ONE_THREAD = "--threads_per_tower=1"


def pipeline_cases() -> list[Case]:
    """One device, and a pipeline of two with each schedule, on the same microbatches."""
    alone = own_case("one device", work_of_flags("towers", 1), _ONE_THREAD, f"--accumulation={_MICROBATCHES}")
    return [alone, *map(pipeline_case, builders.NAMES)]


def pipeline_case(schedule: str) -> Case:
    """A pipeline of two devices; an interleaved one has two stages on each."""
    num_stages = 2 * _DEVICES if schedule == "interleaved" else _DEVICES
    built = builders.build(schedule, num_devices=_DEVICES, num_stages=num_stages, num_microbatches=_MICROBATCHES)
    work = dataclasses.replace(
        work_of_flags("pipeline", _DEVICES), allowed_speedup=_DEVICES * (1.0 - equal_bubble(built))
    )
    more = (f"--stages={num_stages}", f"--grid=stage:{_DEVICES}", f"--microbatches={_MICROBATCHES}")
    return own_case(
        f"pipeline {_DEVICES}, {schedule}", work, *more, f"--pipeline_schedule={schedule}", "--balance=time"
    )


def sharded_cases() -> list[Case]:
    """Two towers whose parameters are on one device, divided over both, or copied; and two slices."""
    work = work_of_flags("towers", _DEVICES)
    kinds = {
        "central": (),
        "sharded": ("--parameter_device=sharded",),
        "replicated": ("--parameter_device=replicated",),
        **{f"zero {stage}": (f"--zero={stage}",) for stage in (1, 2, 3)},
    }
    rows = [own_case(f"towers {_DEVICES}, {name}", work, _ONE_THREAD, *more) for name, more in kinds.items()]
    return [*rows, own_case(f"slices {_DEVICES}", work_of_flags("slices", _DEVICES))]


def ring_zero_cases() -> list[Case]:
    """A ring of two workers on our own engine, without ZeRO and with each stage."""
    work = work_of_flags("ring", _DEVICES, engine=OWN)
    stages = [own_case(f"ring {_DEVICES}, zero {stage}", work, f"--zero={stage}") for stage in (1, 2, 3)]
    return [own_case(f"ring {_DEVICES}, {OWN}", work), *stages]


def recompute_cases() -> list[Case]:
    """Two towers without recomputation, and with each of its policies."""
    work = work_of_flags("towers", _DEVICES)
    return [
        own_case(f"towers {_DEVICES}, recompute {policy}", work, _ONE_THREAD, f"--recompute={policy}")
        for policy in POLICIES
    ]


def larger_cases() -> list[Case]:
    """All of these rows. The groups sharded and recompute share the row of two plain towers."""
    return [*pipeline_cases(), *sharded_cases(), *ring_zero_cases(), *recompute_cases()[1:]]
