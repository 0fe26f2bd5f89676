"""Scalars and the graph of a training step for TensorBoard."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from strategies.callbacks import Callback, Run
from strategies.contract import StepReport


class TensorBoardLog(Callback):
    """Writes event files under `tensorboard/` in the run's directory; a resumed run adds a file."""

    def begin(self, run: Run) -> None:
        self._strategy = run.strategy
        self._graph_written = False
        self._writer = tf.summary.create_file_writer(str(run.directory / "tensorboard"))

    def steps(self, report: StepReport) -> None:
        with tf.device("/device:CPU:0"), self._writer.as_default(step=report.step):
            tf.summary.scalar("train/loss", report.loss)
            for name, value in report.metrics.items():
                tf.summary.scalar(f"train/{name}", value)
            tf.summary.scalar("train/learning_rate", report.learning_rate)
            tf.summary.scalar("train/gradient_norm", report.gradient_norm)
            tf.summary.scalar("speed/images_per_second", report.examples_per_second)
            tf.summary.scalar("speed/input_fraction", report.input_seconds / max(report.seconds, 1e-9))
            self._write_staleness(report)
            if not self._graph_written:
                self._write_graph()

    def _write_staleness(self, report: StepReport) -> None:
        if report.servers is None or not report.servers.staleness:
            return
        counts = report.servers.staleness
        each = np.repeat(list(counts.keys()), list(counts.values()))
        tf.summary.scalar("staleness/mean", each.mean())
        tf.summary.scalar("staleness/max", each.max())
        tf.summary.histogram("staleness", each)

    def _write_graph(self) -> None:
        self._graph_written = True
        graph = self._strategy.graph()
        if graph is not None:
            tf.summary.graph(graph)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        with tf.device("/device:CPU:0"), self._writer.as_default(step=step):
            for name, value in metrics.items():
                tf.summary.scalar(f"evaluation/{name}", value)
            self._writer.flush()

    def end(self) -> None:
        self._writer.close()
