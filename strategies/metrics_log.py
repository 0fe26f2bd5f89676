"""metrics.jsonl: one JSON object a line for every report and evaluation."""

import json
import pathlib
from collections.abc import Mapping

from strategies.callbacks import Callback, Run
from strategies.contract import StepReport


class MetricsLog(Callback):
    """Appends to `metrics.jsonl` in the run's directory; a resumed run goes on in the same file.

    Lines of steps after the checkpoint a run resumed from are dropped: those steps are taken again.
    """

    def begin(self, run: Run) -> None:
        path = run.directory / "metrics.jsonl"
        _keep_until(path, run.first_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in `end`)

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
        )

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(kind="evaluation", step=step, **metrics)

    def end(self) -> None:
        self._file.close()

    def _write(self, **fields) -> None:
        self._file.write(json.dumps({name: _plain(value) for name, value in fields.items()}) + "\n")
        self._file.flush()


def _plain(value):
    """NaN and infinity are no JSON: they are written as null."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def _keep_until(path: pathlib.Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue  # half a line: the run before was killed while it wrote
    temporary = path.with_suffix(".jsonl.new")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
