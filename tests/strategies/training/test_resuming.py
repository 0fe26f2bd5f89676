"""Runs that resume: from which step, with which bits, and what they print about it."""

import contextlib
import dataclasses
import shutil

import pytest

from strategies.callbacks import Callback
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
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
from tests.strategies.training.recorded_run import (
    Failing,
    Failure,
    StopAt,
    fitted,
    json_lines,
    listing,
    strict_json,
)
from tests.tiers import first_quick
from towers.updates.rules import Momentum
from towers.updates.schedules import Constant, Cosine


class TestResume:
    """A stopped and resumed run ends with the same bits as a run that was not stopped."""

    @pytest.fixture(scope="class")
    def undisturbed(self, request):
        name, num_towers = request.param
        strategy = small_strategy(random_task(), name=name, num_towers=num_towers)
        fitted(strategy, steps=11)
        return name, num_towers, values_of(strategy)

    @pytest.mark.parametrize("stop", first_quick([3, STEPS_AN_EPOCH]), ids=["in_an_epoch", "at_its_end"])
    @pytest.mark.parametrize(
        "undisturbed",
        [
            pytest.param(("towers", 2), id="towers"),
            pytest.param(("mirrored", 2), id="mirrored", marks=pytest.mark.full),
        ],
        indirect=True,
    )
    def test_same_bits(self, tmp_path, stop, undisturbed):
        name, num_towers, expected = undisturbed
        stopper = StopAt(stop)
        first = small_strategy(random_task(), name=name, num_towers=num_towers)
        options = {"steps": 11, "directory": tmp_path / "stopped"}
        result, recorder = fitted(first, callbacks=[stopper], stop_requested=stopper.requested, **options)
        assert (result.completed, result.step, recorder.last_step) == (False, stop, stop)
        assert result.files["checkpoint"] == tmp_path / "stopped" / "checkpoints" / f"step-{stop}"
        assert "model" not in result.files
        assert strict_json((tmp_path / "stopped" / "summary.json").read_text())["outcome"] == "interrupted"

        second = small_strategy(random_task(), name=name, num_towers=num_towers)
        result, recorder = fitted(second, **options)
        assert recorder.messages[2:] == [f"resumed at step {stop} of 11"]
        assert (recorder.run.first_step, recorder.calls[0][0], recorder.last_step) == (stop, stop, 11)
        assert result.completed
        assert_same_bits(values_of(second), expected)
        assert second.examples == 2 * NUM_TRAIN + BATCH_SIZE

    @pytest.mark.full
    def test_after_a_failing_callback_the_run_resumes_from_the_last_checkpoint(self, tmp_path):
        undisturbed = small_strategy(random_task())
        fitted(undisturbed, steps=8)
        options = {"steps": 8, "directory": tmp_path, "checkpoint_every_steps": 3, "report_every_steps": 1}
        with pytest.raises(Failure):
            fitted(small_strategy(random_task()), callbacks=[Failing("steps", at=5)], **options)
        second = small_strategy(random_task())
        _, recorder = fitted(second, **options)
        assert recorder.calls[0][0] == 3
        assert_same_bits(values_of(second), values_of(undisturbed))
        steps = [line["step"] for line in json_lines(tmp_path) if line["kind"] == "train"]
        assert steps == list(range(1, 9)), "each step once, in order"

    @pytest.mark.full
    def test_if_the_newest_checkpoint_is_damaged_the_one_before_is_used(self, kept_run, tmp_path):
        shutil.copytree(kept_run.directory, tmp_path / "run")
        newest = tmp_path / "run" / "checkpoints" / "step-12.data-00000-of-00001"
        newest.write_bytes(newest.read_bytes()[:100])
        strategy = small_strategy(random_task(), num_towers=2)
        stopper = StopAt(11)
        options = dataclasses.asdict(kept_run.options) | {"directory": tmp_path / "run"}
        result, recorder = fitted(strategy, callbacks=[stopper], stop_requested=stopper.requested, **options)
        assert recorder.calls[0][0] == 10
        assert result.files["checkpoint"].name == "step-11", "not the damaged one"
        strategy = small_strategy(random_task(), num_towers=2)
        result, recorder = fitted(strategy, **options)
        assert recorder.calls[0][0] == 11
        assert_same_bits(values_of(strategy), values_of(kept_run.strategy))
        assert result.files["checkpoint"].name == "step-12"

    @pytest.mark.full
    def test_a_run_starts_from_a_checkpoint_of_another_run(self, kept_run, tmp_path):
        strategy = small_strategy(random_task(), num_towers=2)
        resume = str(kept_run.directory / "checkpoints" / "step-10")
        before = listing(kept_run.directory)
        result, recorder = fitted(strategy, steps=12, directory=tmp_path / "run", resume=resume)
        assert (recorder.calls[0][0], result.step) == (10, 12)
        assert_same_bits(values_of(strategy), values_of(kept_run.strategy))
        assert listing(kept_run.directory) == before

    @pytest.mark.full
    def test_a_longer_run_resumes_where_a_shorter_one_ended(self, tmp_path):
        fitted(small_strategy(random_task()), steps=4, directory=tmp_path)
        second = small_strategy(random_task())
        _, recorder = fitted(second, steps=6, directory=tmp_path)
        assert recorder.calls[0][0] == 4
        once = small_strategy(random_task())
        fitted(once, steps=6)
        assert_same_bits(values_of(second), values_of(once))

    @pytest.mark.parametrize("evaluated", [False, True])
    def test_an_evaluation_that_a_stop_prevented_is_made_where_the_run_resumes(self, tmp_path, evaluated):
        options = {"steps": 8, "directory": tmp_path, "evaluate_every_epochs": None}
        options |= {"evaluate_every_steps": 4, "checkpoint_every_steps": 4, "report_every_steps": 2}
        if evaluated:
            with pytest.raises(Failure):
                fitted(shared_strategy(), callbacks=[Failing("steps", at=6)], **options)
        else:
            stopper = StopAt(4)
            fitted(shared_strategy(), callbacks=[stopper], stop_requested=stopper.requested, **options)
        assert [line["step"] for line in _evaluations(tmp_path)] == ([4] if evaluated else [])
        _, recorder = fitted(shared_strategy(), **options)
        assert recorder.run.first_step == 4
        assert list(recorder.evaluations) == ([8] if evaluated else [4, 8])
        assert [line["step"] for line in _evaluations(tmp_path)] == [4, 8]

    def test_a_stop_in_that_evaluation_trains_no_further(self, tmp_path):
        stopper, options = StopAt(4), {"steps": 8, "directory": tmp_path, "evaluate_every_steps": 4}
        fitted(shared_strategy(), callbacks=[stopper], stop_requested=stopper.requested, **options)
        answers = iter([False])  # asked before the first move only
        result, recorder = fitted(shared_strategy(), stop_requested=lambda: next(answers, True), **options)
        assert (result.completed, result.step, recorder.calls, recorder.evaluations) == (False, 4, [], {})

    @pytest.mark.parametrize("fails", [False, True], ids=["stopped", "failed"])
    def test_a_longer_run_that_ends_before_its_first_step_is_not_complete(self, tmp_path, fails):
        class Fails(Callback):
            def before_steps(self, step):
                raise Failure

        fitted(shared_strategy(), steps=2, directory=tmp_path)
        with pytest.raises(Failure) if fails else contextlib.nullcontext():
            callbacks = [Fails()] if fails else []
            fitted(
                shared_strategy(),
                steps=4,
                directory=tmp_path,
                callbacks=callbacks,
                stop_requested=lambda: not fails,
            )
        outcome = strict_json((tmp_path / "summary.json").read_text())["outcome"]
        assert outcome == ("failed" if fails else "interrupted")

    def test_a_finished_run_trains_no_more(self, kept_run, tmp_path):
        directory = tmp_path / "run"
        shutil.copytree(kept_run.directory, directory)
        options = dataclasses.asdict(kept_run.options) | {"directory": directory}
        strategy = small_strategy(random_task(), num_towers=2)
        checkpoints = listing(directory / "checkpoints")
        result, recorder = fitted(strategy, **options)
        assert (recorder.calls, result.completed, result.step, result.loss) == ([], True, 12, None)
        assert result.evaluation == pytest.approx(kept_run.result.evaluation)
        assert listing(directory / "checkpoints") == checkpoints
        assert json_lines(directory) == json_lines(kept_run.directory), "each evaluation once"
        assert_same_bits(values_of(strategy), values_of(kept_run.strategy))


class TestCompleteRun:
    """A second run in the directory of a complete one."""

    @pytest.fixture(scope="class")
    def complete(self, tmp_path_factory):
        directory = tmp_path_factory.mktemp("complete")
        fitted(shared_strategy(), steps=5, directory=directory)
        return directory

    @pytest.mark.parametrize(
        "options, task, run, parts",
        first_quick(
            [
                (
                    {},
                    {},
                    {"steps": 5},
                    ("complete at step 5, nothing to do; to train longer, use more than steps=5",),
                ),
                ({}, {}, {"epochs": 1}, ("steps was 5, is 5", "more than epochs=1")),
                ({}, {}, {"steps": 4}, ("; changed since it was saved: steps was 5, is 4; to train longer",)),
                ({"schedule": Constant(0.3)}, {}, {"steps": 5}, ("learning_rate was Cosine, is 0.3",)),
                ({"schedule": Cosine(0.2, 40)}, {}, {"steps": 5}, ("learning_rate.peak was 0.05, is 0.2",)),
                ({"rule": Momentum(momentum=0.5)}, {}, {"steps": 5}, ("optimizer.momentum was 0.9, is 0.5",)),
                ({"num_towers": 2}, {}, {"steps": 5}, ("saved: num_towers was 1, is 2; to",)),
                (
                    {},
                    {"batch_size": 4, "seed": 6},
                    {"steps": 5},
                    ("batch_size was 8, is 4", "task.seed was 5, is 6"),
                ),
            ],
            3,
        ),
    )
    def test_it_says_so_and_names_what_changed(self, complete, options, task, run, parts):
        other_task = {"task": small_task(**task)} if task else {}
        _, recorder = fitted(shared_strategy(**other_task, **options), directory=complete, **run)
        [message] = [message for message in recorder.messages if message.startswith("complete")]
        assert recorder.calls == []
        for part in ("complete at step 5, nothing to do", "resume='never' or another directory", *parts):
            assert (part in message) is (part != "steps was 5, is 5"), (part, message)

    @pytest.mark.parametrize("text", first_quick(["null", "[1, 2]", "7", '{"outcome": []}', "{"]))
    def test_its_summary_that_was_changed_by_hand_is_written_anew(self, tmp_path, caplog, text):
        path = tmp_path / "summary.json"
        fitted(shared_strategy(), steps=1, directory=tmp_path)
        path.write_text(text)
        caplog.clear()
        assert fitted(shared_strategy(), steps=1, directory=tmp_path)[0].completed
        assert strict_json(path.read_text())["outcome"] == "completed"
        (warning,) = [record.message for record in caplog.records if str(path) in record.message]
        assert "put back the file that the run wrote" in warning and "\n" not in warning

    def test_without_a_display_it_is_a_warning(self, complete, caplog):
        Trainer(shared_strategy(), TrainerOptions(steps=5, directory=complete)).fit()
        [line] = [line for line in caplog.messages if "complete at step 5, nothing to do" in line]
        assert "\n" not in line

    def test_a_run_resumed_with_other_settings_names_them(self, tmp_path):
        fitted(shared_strategy(), steps=2, directory=tmp_path)
        _, recorder = fitted(shared_strategy(on_nan="skip"), steps=4, directory=tmp_path)
        changed = "steps was 2, is 4, on_nan was stop, is skip"
        assert recorder.messages[1:] == [f"resumed at step 2 of 4; changed since it was saved: {changed}"]
        _, recorder = fitted(shared_strategy(on_nan="skip"), steps=4, directory=tmp_path)
        assert "changed" not in recorder.messages[1], "the newest checkpoint has the newest settings"


def _evaluations(directory):
    return [line for line in json_lines(directory) if line["kind"] == "evaluation"]
