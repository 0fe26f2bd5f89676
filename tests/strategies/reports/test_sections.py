"""A report's sections reach every output, although no output knows the mode that reports them."""

import dataclasses
import io
import json
import types

import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

from strategies.callbacks import Run
from strategies.reports.metrics_log import MetricsLog
from strategies.reports.progress_display import ProgressDisplay
from strategies.reports.summary import RunFigures, summarize
from strategies.reports.tensorboard_log import TensorBoardLog
from tests.strategies.reports.test_progress_display import report
from tests.towers.logical_cpus import cpus


class Bubbles:
    """A section of a mode that does not exist."""

    def __init__(self, count):
        self.count = count

    def fields(self):
        return {"bubbles": self.count}

    def scalars(self):
        return {"bubbles/count": self.count}

    def histograms(self):
        return {"bubbles": np.arange(self.count)}

    def progress_line(self):
        return f"{self.count} bubbles"

    def new_totals(self):
        return BubbleTotals()


class BubbleTotals:
    def __init__(self):
        self.count = 0

    def add(self, section):
        self.count += section.count

    def summary(self):
        return {"count": self.count}

    def table(self):
        return [f"{self.count} bubbles in all"]


REPORTS = [dataclasses.replace(report(step), sections={"pipeline": Bubbles(step)}) for step in (5, 10)]


def run_of(directory=None):
    strategy = types.SimpleNamespace(graph=lambda: None)
    return Run(strategy=strategy, directory=directory, first_step=0, last_step=20)


def played(callback, directory=None):
    callback.begin(run_of(directory))
    for one in REPORTS:
        callback.steps(one)
    callback.end()


def test_metrics_log(tmp_path):
    played(MetricsLog(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["bubbles"] for line in lines] == [5, 10]


def test_tensorboard(tmp_path):
    played(TensorBoardLog(), tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    tags = [value.tag for event in tf.compat.v1.train.summary_iterator(str(file)) for value in event.summary.value]
    assert tags.count("bubbles/count") == tags.count("bubbles") == 2


def test_progress_display():
    shown = io.StringIO()
    played(ProgressDisplay(Console(file=shown, width=200), line_seconds=0))
    lines = shown.getvalue().splitlines()
    assert [line for line in lines if "bubbles" in line] == ["step 5  5 bubbles", "step 10  10 bubbles"]


@pytest.fixture
def figures():
    figures = RunFigures()
    played(figures)
    return figures


def test_summary(figures):
    strategy = types.SimpleNamespace(step=10, examples=3200, engine_choice=None, devices=cpus(1))
    summary = summarize(figures, strategy, outcome="completed", settings={}, seconds=1.0)
    assert summary["pipeline"] == {"count": 15}
    assert summary["parameter_servers"] is None, "every summary.json has this key"


def test_table(figures):
    assert figures.tables() == ["15 bubbles in all"]
