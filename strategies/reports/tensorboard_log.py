"""TensorBoard logs: scalars, histograms and the graph of a training step.

A run that was killed has written events of steps after its last checkpoint. The run that resumes from there writes
them again, to a new file, so parts of each curve would be drawn twice. Therefore each file begins with the event
SessionLog.START: TensorBoard then drops events in earlier files of this step and of later ones.
"""

import contextlib
import time
from collections.abc import Mapping

import tensorflow as tf

from strategies.callbacks import Callback, Run, writing
from strategies.contract import StepReport


class TensorBoardLog(Callback):
    """Writes event files under `tensorboard/` in the run's directory; a resumed run adds a file.

    When a run resumes, TensorBoard drops the events of steps after its checkpoint: these steps are run again.
    """

    def begin(self, run: Run) -> None:
        self._strategy = run.strategy
        self._graph_written = False
        self._directory = run.directory / "tensorboard"
        with writing(self._directory):
            self._writer = tf.summary.create_file_writer(str(self._directory))
            self._drop_later_events(run.first_step)

    def _drop_later_events(self, step: int) -> None:
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        event = tf.compat.v1.Event(wall_time=time.time(), step=step + 1, session_log=start)
        with tf.device("/device:CPU:0"):
            # tf.summary has no function for this event in eager mode.
            tf.raw_ops.ImportEvent(writer=self._writer._resource, event=event.SerializeToString())
            self._writer.flush()

    def steps(self, report: StepReport) -> None:
        with self._written_at(report.step):
            tf.summary.scalar("train/loss", report.loss)
            for name, value in report.metrics.items():
                tf.summary.scalar(f"train/{name}", value)
            tf.summary.scalar("train/learning_rate", report.learning_rate)
            tf.summary.scalar("train/gradient_norm", report.gradient_norm)
            tf.summary.scalar("speed/images_per_second", report.examples_per_second)
            tf.summary.scalar("speed/input_fraction", report.input_seconds / max(report.seconds, 1e-9))
            self._write_sections(report)
            if not self._graph_written:
                self._write_graph()

    def _write_sections(self, report: StepReport) -> None:
        for section in report.sections.values():
            for tag, value in section.scalars().items():
                tf.summary.scalar(tag, value)
            for tag, values in section.histograms().items():
                tf.summary.histogram(tag, values)

    def _write_graph(self) -> None:
        self._graph_written = True
        graph = self._strategy.graph()
        if graph is not None:
            tf.summary.graph(graph)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._written_at(step):
            for name, value in metrics.items():
                tf.summary.scalar(f"evaluation/{name}", value)

    def end(self) -> None:
        # A failed write was reported when it happened.
        with contextlib.suppress(tf.errors.OpError):
            self._writer.close()

    @contextlib.contextmanager
    def _written_at(self, step: int):
        """Context manager: summaries belong to `step`, and are in the file when it exits."""
        with writing(self._directory), tf.device("/device:CPU:0"), self._writer.as_default(step=step):
            yield
