"""Summarizes the rounds of a benchmark as figures with their spread; writes and reads benchmark.json."""

import contextlib
import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence

from launch.measuring.case import Case
from strategies.atomic_write import write_atomically
from strategies.reports.strict_json import dumps
from towers.errors import UserError

VERSION = 1
# Figures that a case may measure in each round.
RATE, JITTER, FIRST_STEP, MEMORY = "images_per_second", "step_jitter", "first_step_seconds", "peak_memory_bytes"
CPU = "cpu_seconds_per_step"
FIGURES = (RATE, "steps_per_second", JITTER, FIRST_STEP, MEMORY, "loop_over_step", CPU)
PARTS = ("input", "compute", "communication")


def figure(values: Sequence[float]) -> dict[str, float | None]:
    """Median, extremes, and the standard error of the mean, which is None for one round."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "standard_error": error,
    }


def described(case: Case, rounds: Sequence[Mapping]) -> dict:
    """The entry of one case in benchmark.json."""
    found = {
        "name": case.name,
        **dataclasses.asdict(case.work),
        "is_peer": case.is_peer,
        "figures": {
            name: figure([one[name] for one in rounds]) for name in FIGURES if all(name in one for one in rounds)
        },
        "time": None,
        "rounds": list(rounds),
    }
    if all("time" in one for one in rounds):
        found["time"] = {part: statistics.median(one["time"][part] for one in rounds) for part in PARTS}
    return found


def results(cases: Sequence[Case], rounds: Mapping[str, Sequence[Mapping]], environment: Mapping) -> dict:
    """The content of benchmark.json.

    efficiency = rate / rate of one tower with all threads on the same work. The ideal is 1 on CPUs, because all
    cases share the same cores; on GPUs it is the number of devices.
    """
    found = [described(case, rounds[case.name]) for case in cases if rounds[case.name]]
    for one in found:
        alone = [other for other in found if is_one_tower(other) and same_work(one, other)]
        one["efficiency"] = _rate(one) / _rate(alone[0]) if alone and RATE in one["figures"] else None
    left_out = {case.name: case.left_out for case in cases if case.left_out}
    return {"version": VERSION, "environment": dict(environment), "cases": found, "left_out": left_out}


def is_one_tower(one: Mapping) -> bool:
    """Whether a case is the reference for efficiency."""
    return (one["strategy"], one["count"]) == ("towers", 1)


def same_work(one: Mapping, other: Mapping) -> bool:
    """Whether two cases train the same network on the same batches in the same precision."""
    return all(one[field] == other[field] for field in ("network", "batch", "precision"))


def _rate(one: Mapping) -> float:
    return one["figures"][RATE]["median"]


def save(found: Mapping, path: pathlib.Path) -> None:
    """Writes the file atomically; raises UserError if it can't be written."""
    with saving(path):
        write_atomically(path, dumps(found, indent=1) + "\n")


@contextlib.contextmanager
def saving(path: pathlib.Path) -> Iterator[None]:
    """Context manager in which results are written; raises UserError if that fails, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: can't be written ({error.strerror}); make room there, or choose another --output"
        ) from error


def load(path: str) -> dict:
    """The content of a file that `save` wrote.

    Raises:
      UserError: the file does not exist, or is not a benchmark.json of this version.
    """
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a benchmark.json that launch.benchmark wrote") from None
    except ValueError:
        raise UserError(f"{path} is not JSON; give a benchmark.json that launch.benchmark wrote") from None
    if not isinstance(found, dict) or found.get("version") != VERSION or "cases" not in found:
        version = found.get("version") if isinstance(found, dict) else None
        raise UserError(f"{path} has version {version}, but this program reads version {VERSION}; measure again")
    if not all(isinstance(one, dict) and {"name", "figures", "rounds"} <= one.keys() for one in found["cases"]):
        raise UserError(f"{path} has a case without name, figures or rounds: it is damaged; measure again")
    return found
