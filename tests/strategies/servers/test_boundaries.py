"""Saves while asynchronous workers run ahead: no step passes the one at which something is due."""

import json

import numpy as np
import pytest

from strategies.callbacks import Callback
from strategies.servers.carrier import Paused, Progress, Start
from strategies.servers.chief import ServersStrategy
from strategies.servers.options import ServersOptions
from strategies.servers.report_section import ServerFigures
from strategies.servers.tally import Tally
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import BATCH_SIZE, small_task
from tests.towers.logical_cpus import cpus
from towers.options import StepOptions
from towers.updates.rules import SGD
from towers.updates.schedules import Constant

FIGURES = {"examples": BATCH_SIZE, "busy_seconds": 0.0, "input_seconds": 0.0}


class RunsAhead:
    """A carrier whose workers compute three more steps after each call of the chief, if they may."""

    def __init__(self, strategy: ServersStrategy):
        self._done = self._until = 0
        self._state = np.zeros(0)
        self._values: dict = {}
        self.begun_at = None
        self._tally = Tally()

    def free_bytes(self):
        return {}

    def start(self, begin: Start) -> None:
        self._values |= {(None, name): np.ravel(value.numpy()) for name, value in begin.parameters.items()}
        self._state, self._done, self._until = begin.state, begin.step, begin.step
        self.begun_at = begin.step, begin.positions

    def _work_to(self, step: int) -> None:
        for _ in range(self._done, min(step, self._until)):
            self._tally.add_part("worker:0", FIGURES, 0)
            self._tally.add_step({"loss": (1.0, 1.0)}, 1.0, finite=True)
            self._done += 1

    def advance(self, wanted: int, until: int) -> Progress:
        self._until = until
        self._work_to(wanted)
        return Progress(done=self._done, bad_step=None, absent=(), missing=())

    def pause(self) -> Paused:
        self._work_to(self._done + 3)
        positions = [self._done + 4, self._done - 3]
        return Paused(idle=True, missing=(), done=self._done, totals=self._tally.totals(), positions=positions)

    def read(self, slot, name, begin, end):
        return self._values[slot, name][begin:end]

    def state(self):
        return self._state

    def report(self):
        more = {"done": self._done, "totals": self._tally.totals(), "turned_away": 0, "stop_asked": False}
        return more | self._tally.take()

    def server_figures(self):
        counts = dict.fromkeys(("kept_bytes", "pulls", "pushes", "sent_bytes", "received_bytes"), 0)
        return [ServerFigures(name="ps:0", **counts)]

    def end(self, how: str) -> None:
        pass


class Evaluations(Callback):
    def __init__(self):
        self.steps_of, self.reported = [], []

    def evaluation(self, step, metrics):
        self.steps_of.append(step)

    def steps(self, report):
        self.reported.append((report.step, report.num_steps))


def new_strategy(make_carrier=RunsAhead) -> ServersStrategy:
    return ServersStrategy(
        small_task(),
        cpus(1),
        StepOptions(rule=SGD(), schedule=Constant(0.1), seed=3),
        None,
        make_carrier=make_carrier,
        servers=ServersOptions(engine="own"),
        num_workers=1,
        num_servers=1,
        startup_timeout_seconds=1.0,
    )


@pytest.mark.full
def test_a_resumed_run_tells_the_servers_each_workers_next_batch(tmp_path):
    options = {"directory": tmp_path, "evaluate_every_epochs": None}
    Trainer(new_strategy(), TrainerOptions(steps=6, **options)).fit()
    carriers = []

    def make_carrier(strategy):
        carriers.append(RunsAhead(strategy))
        return carriers[0]

    Trainer(new_strategy(make_carrier), TrainerOptions(steps=8, **options)).restore()
    assert carriers[0].begun_at == (6, [10, 3])


def test_a_run_that_is_saved_all_the_time_ends_at_its_last_step(tmp_path):
    found = Evaluations()
    options = TrainerOptions(
        steps=20,
        directory=tmp_path,
        checkpoint_every_seconds=1e-9,
        evaluate_every_steps=10,
        evaluate_every_epochs=None,
    )
    result = Trainer(new_strategy(), options, callbacks=[found]).fit()
    assert (result.step, result.summary["steps"]) == (20, 20)
    assert found.steps_of == [10, 20]
    assert sum(count for _, count in found.reported) == 20
    assert all(count for _, count in found.reported)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert np.all(np.diff([line["step"] for line in lines if line["kind"] == "train"]) > 0)
