"""summary.json: a run's settings and results in one file for programs to read."""

import dataclasses
import json
import pathlib
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata

import psutil
import tensorflow as tf

import towers
from strategies.atomic_write import write_atomically
from strategies.callbacks import Callback
from strategies.contract import SectionTotals, StepReport, Strategy, WorkerTime
from strategies.reports.strict_json import dumps
from towers.devices import Devices
from towers.errors import UserError, either
from towers.hardware.cpu_kernels import cpu_kernels

# Increase it when a field changes its meaning or is removed, not for a new field.
VERSION = 1
# How a run can end.
OUTCOMES = ("completed", "interrupted", "not_finite", "failed")
# An error shows at most this many characters of an invalid file.
_SHOWN = 60
# Report sections that have a key in every summary.json: null if no report had the section.
_SECTIONS = ("parameter_servers",)
# A worker is a straggler if its time is at least this multiple of the others' median.
STRAGGLES_FROM = 1.2


@dataclasses.dataclass
class RunFigures(Callback):
    """Gathers a run's figures from its reports.

    The first report contains the step that compiles, so `images_per_second` is the median over the other reports,
    and `seconds_a_step` belongs to the newest of these.
    """

    first_seconds: float | None = None
    skipped_steps: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    evaluated: Mapping[str, float] | None = None
    evaluated_step: int | None = None
    rates: list[float] = dataclasses.field(default_factory=list)
    seconds_a_step: float | None = None
    workers: dict[str, WorkerTime] = dataclasses.field(default_factory=dict)
    sections: dict[str, SectionTotals] = dataclasses.field(default_factory=dict)

    def steps(self, report: StepReport) -> None:
        if self.first_seconds is None:
            self.first_seconds = report.seconds
        else:
            self.rates.append(report.examples_per_second)
            self.seconds_a_step = report.seconds / report.num_steps
            self._add_workers(report.workers)
        for name, section in report.sections.items():
            self.sections.setdefault(name, section.new_totals()).add(section)
        self.skipped_steps += report.skipped
        self.loss, self.metrics = report.loss, dict(report.metrics)

    def _add_workers(self, times: Sequence[WorkerTime]) -> None:
        for time in times:
            before = self.workers.get(time.name, WorkerTime(name=time.name, busy_seconds=0.0, input_seconds=0.0))
            self.workers[time.name] = WorkerTime(
                name=time.name,
                busy_seconds=before.busy_seconds + time.busy_seconds,
                input_seconds=before.input_seconds + time.input_seconds,
            )

    def tables(self) -> list[str]:
        """Lines for a person with the totals of all report sections."""
        return [line for totals in self.sections.values() for line in totals.table()]

    def straggler(self) -> tuple[str, float] | None:
        """The straggler's name, and its time divided by the median of the others'; None if there is none."""
        if len(self.workers) < 2 or not any(time.busy_seconds for time in self.workers.values()):
            return None  # on GPUs steps are not timed
        own = {name: time.busy_seconds + time.input_seconds for name, time in self.workers.items()}
        slowest = max(own, key=own.get)
        others = statistics.median(seconds for name, seconds in own.items() if name != slowest)
        factor = own[slowest] / max(others, 1e-9)
        return (slowest, factor) if factor >= STRAGGLES_FROM else None

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluated, self.evaluated_step = dict(metrics), step

    @property
    def images_per_second(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None


def peak_memory_bytes() -> dict[str, int]:
    """Peak memory of each device, by name; 'host' is the peak resident size of this process."""
    memory = psutil.Process().memory_info()
    found = {"host": getattr(memory, "peak_wset", None) or _peak_resident_bytes()}
    for index in range(len(tf.config.get_visible_devices("GPU"))):
        found[f"gpu:{index}"] = int(tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"])
    return found


def _peak_resident_bytes() -> int:
    import resource  # Windows lacks it; psutil reports the peak there

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    packages = ("tensorflow", "keras", "numpy", "tensorflow-datasets")
    found = {"python": platform.python_version(), "towers": towers.__version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def summarize(figures: RunFigures, strategy: Strategy, *, outcome: str, settings: Mapping, seconds: float) -> dict:
    """The content of summary.json.

    Steps and examples include those of the runs that this one resumes; all other fields are for this run only.

    Args:
      figures: the figures of the whole run.
      strategy: the strategy at the end of the run.
      outcome: one of OUTCOMES.
      settings: the flags.
      seconds: wall time of `fit`.
    """
    straggler = figures.straggler()
    return {
        "version": VERSION,
        "outcome": outcome,
        "flags": dict(settings),
        "engine": None if strategy.engine_choice is None else dataclasses.asdict(strategy.engine_choice),
        "versions": versions(),
        "cpu_kernels": cpu_kernels(),
        "devices": _described(strategy.devices),
        "steps": strategy.step,
        "examples": strategy.examples,
        "skipped_steps": figures.skipped_steps,
        "loss": figures.loss,
        "metrics": dict(figures.metrics),
        "evaluation": figures.evaluated,
        "images_per_second": figures.images_per_second,
        "time_to_first_step_seconds": figures.first_seconds,
        "training_seconds": seconds,
        "workers": {
            name: {"busy_seconds": time.busy_seconds, "input_seconds": time.input_seconds}
            for name, time in figures.workers.items()
        },
        **dict.fromkeys(_SECTIONS),
        **{name: totals.summary() for name, totals in figures.sections.items()},
        "straggler": None if straggler is None else {"name": straggler[0], "times_the_others": straggler[1]},
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _described(devices: Devices) -> dict:
    """The devices of this process; `parameters` only if the parameter device was chosen automatically."""
    return {
        "towers": list(devices.towers),
        "gpus": [gpu.described for gpu in devices.gpus],
        "parameters": {"device": devices.choice, "reason": devices.reason} if devices.reason else None,
    }


def read_outcome(path: pathlib.Path) -> str:
    """The outcome in a run's summary.json.

    Raises:
      FileNotFoundError: there is no file.
      UserError: the file can't be read, or its contents were not written by a run.
    """
    fix = "remove it, or put back the file that the run wrote"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise UserError(f"{path}: can't be read ({why}); {fix}") from error
    outcome = summary.get("outcome") if isinstance(summary, dict) else None
    if outcome not in OUTCOMES:
        held = json.dumps(summary if not isinstance(summary, dict) else {"outcome": outcome})
        held = held if len(held) <= _SHOWN else held[:_SHOWN] + "..."
        raise UserError(
            f"{path}: holds {held}, but must be a JSON object whose 'outcome' is {either(OUTCOMES)}; {fix}"
        )
    return outcome


def write_summary(summary: Mapping, path: pathlib.Path) -> None:
    """Writes the file atomically."""
    write_atomically(path, dumps(summary, indent=2) + "\n")
