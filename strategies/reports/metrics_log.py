"""metrics.jsonl: one line, a JSON object, for each report and each evaluation."""

import contextlib
import json
import pathlib
from collections.abc import Mapping

from strategies.atomic_write import write_atomically
from strategies.callbacks import Callback, Run, writing
from strategies.contract import StepReport
from strategies.reports.strict_json import dumps


class MetricsLog(Callback):
    """Appends to `metrics.jsonl` in the run's directory; a resumed run appends to the same file.

    When a run resumes, the lines of steps after its checkpoint are dropped, because these steps are run again.
    """

    def begin(self, run: Run) -> None:
        self._path = run.directory / "metrics.jsonl"
        with writing(self._path):
            _drop_repeated_lines(self._path, run)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed in `end`)

    def steps(self, report: StepReport) -> None:
        self._write(
            kind="train",
            step=report.step,
            loss=report.loss,
            **report.metrics,
            learning_rate=report.learning_rate,
            gradient_norm=report.gradient_norm,
            skipped_steps=report.skipped,
            examples=report.examples,
            seconds=report.seconds,
            input_seconds=report.input_seconds,
            images_per_second=report.examples_per_second,
            **_section_fields(report),
        )

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(kind="evaluation", step=step, **metrics)

    def end(self) -> None:
        # Every line was flushed when it was written, and a failure was reported then.
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, **fields) -> None:
        with writing(self._path):
            self._file.write(dumps(fields) + "\n")
            self._file.flush()


def evaluated_steps(log: pathlib.Path) -> set[int]:
    """Steps whose evaluation is in a metrics.jsonl; empty if the file does not exist."""
    if not log.exists():
        return set()
    found = set()
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        # The last line may be incomplete; `MetricsLog` drops lines that are not records.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["kind"] == "evaluation":
                found.add(record["step"])
    return found


def _section_fields(report: StepReport) -> dict:
    return {name: value for section in report.sections.values() for name, value in section.fields().items()}


def _drop_repeated_lines(path: pathlib.Path, run: Run) -> None:
    """Drops broken lines and those that this run writes again: later steps, and a finished run's evaluation."""
    if not path.exists():
        return
    finished, lines = run.first_step >= run.last_step, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            again = finished and (record["kind"], record["step"]) == ("evaluation", run.first_step)
            if record["step"] <= run.first_step and not again:
                lines.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # an incomplete line: the run was killed while it wrote
    write_atomically(path, "".join(lines))
