"""A run of the Trainer whose callbacks are recorded, or fail on purpose."""

import json

from strategies.callbacks import Callback
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions


class Recorder(Callback):
    """Records all calls of its methods."""

    def __init__(self):
        self.calls, self.evaluations, self.messages, self.ended = [], {}, [], 0

    def begin(self, run):
        self.run = run

    def steps(self, report):
        self.calls.append((report.step - report.num_steps, report.step))

    def evaluation(self, step, metrics):
        assert step not in self.evaluations, "evaluated twice"
        self.evaluations[step] = dict(metrics)

    def message(self, text):
        self.messages.append(text)

    def end(self):
        self.ended += 1

    @property
    def last_step(self):
        return self.calls[-1][1] if self.calls else None


class StopAt(Callback):
    """Requests a stop once a step is reached."""

    def __init__(self, step):
        self._step, self._reached = step, False

    def boundaries(self):
        return (self._step,)

    def steps(self, report):
        self._reached = report.step >= self._step

    def requested(self):
        return self._reached


def fitted(strategy, *, callbacks=(), stop_requested=lambda: False, **options):
    """(result, recorder) of a finished run."""
    recorder = Recorder()
    trainer = Trainer(
        strategy, TrainerOptions(**options), callbacks=[*callbacks, recorder], stop_requested=stop_requested
    )
    return trainer.fit(), recorder


def json_lines(directory):
    """The records of metrics.jsonl."""
    return [strict_json(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def strict_json(text):
    """Parses JSON as the standard defines it, without NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def listing(directory):
    return sorted((str(path), path.stat().st_size) for path in directory.rglob("*"))


class Failure(Exception):
    """Raised on purpose."""


class Failing(Callback):
    """Raises in one of its methods, from step `at` on."""

    def __init__(self, method, at=0):
        def fail(*arguments):
            step = getattr(arguments[0], "step", None) if arguments else None
            if step is None or step >= at:
                raise Failure(method)

        setattr(self, method, fail)
