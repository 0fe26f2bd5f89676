"""The loop: which steps are reported and evaluated when, and evaluations that fail or are stopped."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.own_task import OwnTask
from tests.strategies.small_task import (
    BATCH_SIZE,
    NUM_TRAIN,
    STEPS_AN_EPOCH,
    assert_same_bits,
    random_task,
    shared_strategy,
    small_strategy,
    small_task,
    values_of,
)
from tests.strategies.training.recorded_run import Failure, StopAt, fitted, strict_json
from tests.tiers import first_quick


class TestLoop:
    def test_length_in_steps(self):
        result, recorder = fitted(shared_strategy(), steps=7)
        assert (result.completed, result.step, recorder.last_step) == (True, 7, 7)
        assert recorder.calls == sorted(recorder.calls)
        assert sum(end - begin for begin, end in recorder.calls) == 7
        assert result.files == {}

    @pytest.mark.parametrize("epochs, steps", first_quick([(1.4, 7), (2, 10), (0.2, 1), (0.01, 1)]))
    def test_length_in_epochs(self, epochs, steps):
        _, recorder = fitted(shared_strategy(), epochs=epochs, evaluate_every_epochs=None)
        assert recorder.last_step == steps
        assert list(recorder.evaluations) == [steps]

    def test_examples_are_counted(self):
        strategy = shared_strategy()
        result, _ = fitted(strategy, steps=STEPS_AN_EPOCH + 1)
        assert strategy.examples == NUM_TRAIN + BATCH_SIZE == result.summary["examples"]

    @pytest.mark.full
    def test_evaluations_at_multiples_of_steps(self):
        options = {"evaluate_every_steps": 3, "evaluate_every_epochs": None, "report_every_steps": 100}
        _, recorder = fitted(shared_strategy(), steps=8, **options)
        assert list(recorder.evaluations) == [3, 6, 8]

    def test_the_last_evaluation_of_a_stopped_run_names_its_step(self):
        stopper = StopAt(4)
        options = {"evaluate_every_steps": 3, "callbacks": [stopper], "stop_requested": stopper.requested}
        result, _ = fitted(shared_strategy(), steps=8, **options)
        assert (result.step, result.evaluated_step) == (4, 3)

    def test_steps_that_workers_make_while_a_stopped_run_is_saved_are_reported(self, tmp_path, monkeypatch):
        strategy, stopper, unreported = shared_strategy(), StopAt(4), []
        run_steps, start_steps = strategy.run_steps, strategy.start_steps
        monkeypatch.setattr(strategy, "begin_saving", lambda: unreported.append(run_steps(2)))
        monkeypatch.setattr(
            strategy, "start_steps", lambda count: start_steps(count) if count else unreported.pop()
        )
        options = {"callbacks": [stopper], "stop_requested": stopper.requested, "directory": tmp_path}
        result, recorder = fitted(strategy, steps=8, evaluate_every_epochs=None, **options)
        assert (result.step, recorder.calls[-1]) == (6, (4, 6))

    def test_evaluations_at_fractions_of_an_epoch(self):
        _, recorder = fitted(shared_strategy(), steps=7, evaluate_every_epochs=0.6)
        assert list(recorder.evaluations) == [3, 6, 7]

    def test_the_last_step_is_evaluated_once(self):
        _, recorder = fitted(shared_strategy(), steps=6, evaluate_every_steps=3, evaluate_every_epochs=1)
        assert list(recorder.evaluations) == [3, 5, 6]

    @pytest.mark.full
    def test_reports_at_multiples_of_steps(self):
        _, recorder = fitted(shared_strategy(), steps=7, report_every_steps=3, evaluate_every_epochs=None)
        assert [end for _, end in recorder.calls if end > 1] == [3, 6, 7]

    @pytest.mark.full
    def test_the_length_of_calls_does_not_change_the_numbers(self):
        task, found = random_task(), []
        for report_every_steps in (1, 4):
            strategy = shared_strategy(task=task)
            fitted(strategy, steps=8, report_every_steps=report_every_steps)
            found.append(values_of(strategy))
        assert_same_bits(*found)

    def test_no_call_passes_a_boundary(self):
        _, recorder = fitted(shared_strategy(), callbacks=[StopAt(3)], steps=6, report_every_steps=4)
        assert {3, 4} <= {end for _, end in recorder.calls}


class _NoEvaluation:
    """A task whose evaluation data can't be read; `num_examples` says how many there are: 0 for none."""

    def __init__(self, task, *, num_examples=None):
        self._task, self._num_examples = task, num_examples

    def num_examples(self, split):
        return self._num_examples if split == "eval" else self._task.num_examples(split)

    def dataset(self, split, shard):
        if split == "eval":
            raise Failure("evaluation")
        return self._task.dataset(split, shard)

    def __getattr__(self, name):
        return getattr(self._task, name)


class TestEvaluationData:
    @pytest.mark.full
    def test_a_last_evaluation_that_fails_loses_nothing(self, tmp_path):
        strategy = small_strategy(_NoEvaluation(random_task()))
        with pytest.raises(Failure):
            fitted(strategy, steps=STEPS_AN_EPOCH, directory=tmp_path)
        assert strategy.step == STEPS_AN_EPOCH
        assert (tmp_path / "model.keras").exists()
        assert strict_json((tmp_path / "summary.json").read_text())["outcome"] == "failed"
        mended = small_strategy(random_task())
        result, recorder = fitted(mended, steps=STEPS_AN_EPOCH, directory=tmp_path)
        assert (recorder.calls, list(recorder.evaluations)) == ([], [STEPS_AN_EPOCH])
        assert result.evaluation["accuracy"] >= 0
        assert_same_bits(values_of(mended), values_of(strategy))

    @pytest.mark.full
    def test_an_evaluation_that_fails_on_the_way_loses_nothing(self, tmp_path):
        strategy = small_strategy(_NoEvaluation(small_task()))
        with pytest.raises(Failure):
            fitted(strategy, steps=9, directory=tmp_path, evaluate_every_steps=3)
        _, recorder = fitted(small_strategy(), steps=9, directory=tmp_path)
        assert recorder.calls[0][0] == 3

    @pytest.mark.parametrize("steps", first_quick([2, 5]), ids=["the last one", "one on the way"])
    def test_a_stop_during_an_evaluation_does_not_wait_for_its_end(self, tmp_path, steps):
        read, num_batches = [], 40
        x = np.ones((8, 3), np.float32)

        def batches():
            for index in range(num_batches):
                read.append(index)
                yield x, x[:, :1]

        spec = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1)))

        def strategy():
            task = OwnTask(
                model=lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="line")]),
                train_data=(x, x[:, :1]),
                eval_data=tf.data.Dataset.from_generator(batches, output_signature=spec),
                losses=keras.losses.MeanSquaredError(),
                batch_size=8,
            )
            return small_strategy(task)

        options = {"steps": steps, "directory": tmp_path, "evaluate_every_steps": 2, "evaluate_every_epochs": None}
        stopped = strategy()
        read.clear()
        result, recorder = fitted(stopped, stop_requested=lambda: len(read) > 2, **options)
        assert (result.completed, result.step, recorder.evaluations) == (False, 2, {})
        assert len(read) < num_batches / 2
        assert strict_json((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"
        result, recorder = fitted(strategy(), **options)
        assert (result.completed, result.step, max(recorder.evaluations)) == (True, steps, steps)
        assert strict_json((tmp_path / "summary.json").read_text())["outcome"] == "completed"

    def test_without_evaluation_data_nothing_is_evaluated(self, tmp_path):
        strategy = small_strategy(_NoEvaluation(small_task(), num_examples=0))
        result, recorder = fitted(strategy, steps=7, directory=tmp_path, evaluate_every_steps=2)
        assert (result.completed, result.evaluation, recorder.evaluations) == (True, None, {})
        assert strict_json((tmp_path / "summary.json").read_text())["evaluation"] is None
        assert any("no evaluation data" in message for message in recorder.messages)
