"""The Trainer: its arguments, its callbacks, its files, and runs that end early."""

import dataclasses
import math
import pathlib
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from models.own_task import OwnTask
from strategies.callbacks import Callback
from strategies.errors import NonFiniteStep
from strategies.registry import build_strategy
from strategies.reports.profiler import Profiler
from strategies.reports.tensorboard_log import TensorBoardLog
from strategies.training.checkpoints import Checkpoints
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import (
    BATCH_SIZE,
    NUM_EVAL,
    NUM_TRAIN,
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
    Recorder,
    fitted,
    json_lines,
    listing,
    strict_json,
)
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.task import InputShard
from towers.updates.schedules import Constant

HUGE = 1e38


class TestArguments:
    def test_epochs_of_unknown_length_are_refused(self):
        task = small_task()
        strategy = small_strategy(task)
        strategy.task = _LengthUnknown(task)
        with refused("epochs=2", "give steps instead"):
            Trainer(strategy, TrainerOptions(epochs=2))
        assert Trainer(strategy, TrainerOptions(steps=1)).fit().completed

    def test_an_epoch_may_be_known_by_its_batches(self):
        strategy = small_strategy(small_task())
        strategy.task = _LengthUnknown(strategy.task)
        strategy.task.batches_per_epoch = 3
        result, recorder = fitted(strategy, epochs=2)
        assert (result.step, list(recorder.evaluations)) == (6, [3, 6])

    @pytest.mark.parametrize(
        "options, parts",
        [
            ({}, ("steps=None", "give exactly one of them")),
            ({"steps": 1, "epochs": 1}, ("epochs=1", "give exactly one of them")),
            ({"steps": 0}, ("steps=0", "more than 0")),
            ({"epochs": -1.0}, ("epochs=-1.0", "more than 0")),
            ({"steps": 1, "evaluate_every_epochs": math.nan}, ("evaluate_every_epochs=nan", "more than 0")),
            ({"steps": 1, "checkpoint_every_steps": 0}, ("checkpoint_every_steps=0", "more than 0")),
            ({"steps": 2.5}, ("steps=2.5", "an integer")),
            ({"steps": "3"}, ("steps='3'", "an integer")),
            ({"steps": 1, "checkpoint_every_seconds": "1"}, ("checkpoint_every_seconds='1'", "a number")),
            ({"steps": 1, "keep_checkpoints": 1.5}, ("keep_checkpoints=1.5", "an integer")),
            ({"steps": 1, "keep_checkpoints": True}, ("keep_checkpoints=True", "an integer")),
            ({"steps": 1, "resume": None}, ("resume=None", "'auto'")),
            ({"steps": 1, "directory": 5}, ("directory=5", "the path of a folder")),
            ({"steps": 1, "directory": ""}, ("directory=''", "the path of a folder")),
            ({"steps": 1, "directory": "a\0b"}, (r"directory='a\x00b'", "NUL characters; remove them")),
            ({"steps": 1, "resume": "a\0b"}, (r"resume='a\x00b'", "NUL characters; remove them")),
        ],
    )
    def test_wrong_options_are_refused(self, options, parts):
        with refused(*parts):
            TrainerOptions(**options)

    @pytest.mark.parametrize(
        "changed, parts",
        [
            ({"strategy": "towers"}, ("strategy is a str", "build_strategy(...)")),
            ({"options": {"steps": 1}}, ("options is a dict", "TrainerOptions(steps=100)")),
            ({"callbacks": Callback()}, ("callbacks=", "must be a list")),
            (
                {"callbacks": [keras.callbacks.Callback()]},
                ("a callback is a keras", "strategies.callbacks.Callback"),
            ),
            ({"stop_requested": True}, ("stop_requested=True", "a function")),
        ],
    )
    def test_an_argument_of_another_type_is_refused(self, changed, parts):
        with refused(*parts):
            Trainer(**{"strategy": shared_strategy(), "options": TrainerOptions(steps=1)} | changed)

    def test_a_directory_in_the_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert Trainer(shared_strategy(), TrainerOptions(steps=1, directory="~/run")).directory == tmp_path / "run"


class _LengthUnknown:
    """A task whose number of examples is unknown."""

    def __init__(self, task):
        self._task = task

    def num_examples(self, split):
        return None

    def __getattr__(self, name):
        return getattr(self._task, name)


def evaluated_by_numpy(task, strategy):
    """Mean loss and accuracy over all held-out examples at once, in float64."""
    [batch] = dataclasses.replace(task, eval_batch_size=NUM_EVAL).dataset("eval", InputShard())
    images, labels = batch.features.numpy().astype(np.float64), batch.labels.numpy()
    assert len(labels) == NUM_EVAL
    by_name = {name: np.float64(value) for name, value in strategy.checkpointables()["parameters"].items()}
    flat = images.reshape(NUM_EVAL, -1)
    hidden = np.maximum(flat @ by_name["hidden0/kernel"] + by_name["hidden0/bias"], 0)
    logits = hidden @ by_name["logits/kernel"] + by_name["logits/bias"]
    log_sums = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    losses = log_sums - logits[np.arange(NUM_EVAL), labels]
    return {"loss": losses.mean(), "accuracy": (logits.argmax(1) == labels).mean()}


@pytest.mark.parametrize("name", first_quick(["towers", "mirrored"]))
@pytest.mark.parametrize("eval_batch_size", first_quick([7, 1, NUM_EVAL - 1, NUM_EVAL, NUM_EVAL + 1]))
def test_evaluation_is_exact_whatever_the_last_batch(eval_batch_size, name, monkeypatch):
    """With four towers, so that a last batch of one example leaves three of them idle."""
    task = small_task(eval_batch_size=eval_batch_size)
    strategy = shared_strategy(name=name, num_towers=4)
    monkeypatch.setattr(strategy, "task", task)
    strategy.run_steps(3)
    found = Trainer(strategy, TrainerOptions(steps=3)).evaluate()
    expected = evaluated_by_numpy(task, strategy)
    assert found["accuracy"] == expected["accuracy"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


class TestNotFinite:
    """A learning rate of 1e38 makes the parameters so large that the next step overflows."""

    def test_stop(self, tmp_path):
        strategy = shared_strategy(schedule=_Jump(3))
        recorder = Recorder()
        trainer = Trainer(
            strategy,
            TrainerOptions(steps=10, directory=tmp_path, checkpoint_every_steps=2, report_every_steps=2),
            callbacks=[recorder],
        )
        with pytest.raises(NonFiniteStep, match="step 4 is not finite .* lower the learning rate") as caught:
            trainer.fit()
        assert caught.value.step == 4
        assert "\n" not in str(caught.value)
        assert recorder.ended == 1
        summary = strict_json((tmp_path / "summary.json").read_text())
        assert summary["outcome"] == "not_finite"
        assert strategy.step == summary["steps"] == 5, "the bad step used its batch"
        # The checkpoint is of the step before the bad one, so all of its values are finite.
        again = small_strategy()
        assert Checkpoints(tmp_path / "checkpoints", again).restore_latest() == 4
        found = values_of(again)
        expected = {name: value for name, value in values_of(strategy).items() if not name.startswith("counters/")}
        assert_same_bits({name: found[name] for name in expected}, expected)

    @pytest.mark.full
    def test_stop_in_the_middle_of_a_call(self, tmp_path):
        strategy = shared_strategy(schedule=_Jump(3))
        options = TrainerOptions(steps=10, directory=tmp_path, report_every_steps=10, evaluate_every_epochs=None)
        with pytest.raises(NonFiniteStep, match="step 4 "):
            Trainer(strategy, options).fit()
        assert strategy.step == 5

    def test_skip(self, tmp_path):
        strategy = shared_strategy(schedule=_Jump(3), on_nan="skip")
        result, _ = fitted(strategy, steps=6, directory=tmp_path, report_every_steps=2)
        assert result.completed
        summary = strict_json((tmp_path / "summary.json").read_text())
        assert (summary["outcome"], summary["steps"], summary["skipped_steps"]) == ("completed", 6, 2)
        assert summary["loss"] is None, "no step of the last report was finite"
        for line in json_lines(tmp_path):
            if line["kind"] == "train":
                assert (line["loss"] is None) == (line["step"] > 4)
        assert int(strategy.checkpointables()["counters"]["updates"]) == 4

    def test_skipped_steps_change_nothing(self):
        """A batch of NaN is skipped, and leaves no trace in the parameters."""
        strategy = small_strategy(_OneBadBatch(small_task(), bad=2), on_nan="skip", schedule=Constant(0.05))
        result, _ = fitted(strategy, steps=4, report_every_steps=1)
        assert result.summary["skipped_steps"] == 1
        assert math.isfinite(result.loss)
        assert all(np.isfinite(value).all() for value in values_of(strategy).values())

    @pytest.mark.full
    def test_the_error_says_that_a_batch_is_bad(self):
        strategy = small_strategy(_OneBadBatch(small_task(), bad=2))
        with pytest.raises(NonFiniteStep, match="step 2 .* holds NaN or infinite features"):
            fitted(strategy, steps=4)


@dataclasses.dataclass(frozen=True)
class _Jump:
    """A small learning rate, except at one step."""

    at: int

    def __call__(self, step):
        return HUGE if step == self.at else 0.01


class _OneBadBatch:
    """A task whose features are NaN in the batch with index `bad`."""

    def __init__(self, task, bad):
        self._task, self._bad = task, bad

    def dataset(self, split, shard):
        batches = self._task.dataset(split, shard)
        if split != "train":
            return batches
        indices = tf.data.Dataset.counter(shard.first_batch)
        return tf.data.Dataset.zip(indices, batches).map(
            lambda index, batch: batch._replace(
                features=tf.where(tf.equal(index, self._bad), math.nan, batch.features)
            )
        )

    def __getattr__(self, name):
        return getattr(self._task, name)


@pytest.mark.full
@pytest.mark.parametrize("fused", [True, False])
def test_layers_on_the_fused_kernel_are_reported(fused):
    strategy = small_strategy(small_task(batch_norm=True, depth=2), fused_batch_norm=fused)
    _, recorder = fitted(strategy, steps=1)
    notice = "2 BatchNormalization layers on TensorFlow's fused kernel (fused_batch_norm=False disables this)"
    devices, *others = recorder.messages
    assert devices == "devices of this process: 1 tower on cpu:0"
    assert others == ([notice] if fused else [])


class TestDataThatAreNotFinite:
    """One example of the fifth batch of 8 is NaN, which the check of the first batch does not see."""

    X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
    Y = X[:, :1].copy()
    BAD = np.where(np.arange(48) == 35, np.nan, 1).astype(np.float32)

    def strategy(self, name="towers", **data):
        def build():
            return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

        def batches(part):
            return tf.data.Dataset.from_tensor_slices(part).batch(8)

        plain = {"train_data": batches((self.X, self.Y)), "eval_data": (self.X, self.Y)}
        fields = plain | {key: batches(part) for key, part in data.items()}
        task = OwnTask(model=build, losses=keras.losses.MeanSquaredError(), batch_size=8, **fields)
        return build_strategy(name, task, cpus(2), StepOptions(schedule=Constant(0.01)))

    def parts(self):
        return {
            "features": (self.X * self.BAD[:, None], self.Y),
            "labels": (self.X, self.Y * self.BAD[:, None]),
            "weights": (self.X, self.Y, self.BAD),
        }

    @pytest.mark.parametrize("part", first_quick(["weights", "labels", "features"]))
    def test_training_names_the_part(self, part):
        strategy = self.strategy(train_data=self.parts()[part])
        with pytest.raises(
            NonFiniteStep, match=f"step 4 .* its batch holds NaN or infinite {part}: clean the data"
        ):
            fitted(strategy, steps=6, evaluate_every_epochs=None)

    @pytest.mark.parametrize("part", first_quick(["labels", "features"]))
    def test_evaluation_names_the_part_after_all_is_saved(self, part, tmp_path):
        strategy = self.strategy(eval_data=self.parts()[part])
        with refused(f"the evaluation data hold NaN or infinite {part}, in batch 4", "clean the data"):
            fitted(strategy, steps=6, evaluate_every_epochs=None, directory=tmp_path)
        assert (tmp_path / "checkpoints" / "step-6.index").exists()

    @pytest.mark.full
    def test_a_loss_that_is_not_finite_on_clean_data_is_reported_as_it_is(self):
        strategy = self.strategy()
        for variable in strategy.engine.parameters().values():
            variable.assign(tf.fill(variable.shape, HUGE))
        assert not math.isfinite(strategy.evaluate()["loss"])


class TestMetrics:
    def test_lines(self, kept_run):
        lines = json_lines(kept_run.directory)
        training = [line for line in lines if line["kind"] == "train"]
        assert [line["step"] for line in training] == [1, 2, 4, 6, 8, 10, 12]
        assert sum(line["examples"] for line in training) == kept_run.strategy.examples
        for line in training:
            assert line.keys() == {
                "kind",
                "step",
                "loss",
                "accuracy",
                "learning_rate",
                "gradient_norm",
                "skipped_steps",
                "examples",
                "seconds",
                "input_seconds",
                "images_per_second",
            }
            assert math.isfinite(line["loss"])
            assert 0 <= line["input_seconds"] <= line["seconds"]
            assert line["learning_rate"] == kept_run.strategy.options.schedule(line["step"] - 1)
        evaluations = [line for line in lines if line["kind"] == "evaluation"]
        assert [line["step"] for line in evaluations] == [4, 8, 12]
        assert evaluations[-1]["loss"] == kept_run.result.evaluation["loss"]

    @pytest.mark.full
    @pytest.mark.parametrize(
        "half", [b'{"kind": "train", "st', b'{"kind": "train"}', b"\x00\x00\x00", b"\xff\xfe", b"[1", b"7"]
    )
    def test_an_incomplete_last_line_is_dropped(self, tmp_path, half):
        fitted(shared_strategy(), steps=2, directory=tmp_path, report_every_steps=1)
        whole = (tmp_path / "metrics.jsonl").read_text()
        (tmp_path / "metrics.jsonl").write_bytes(whole.encode() + half)
        fitted(shared_strategy(), steps=3, directory=tmp_path, report_every_steps=1)
        assert (tmp_path / "metrics.jsonl").read_text().startswith(whole)
        assert [line["step"] for line in json_lines(tmp_path) if line["kind"] == "train"] == [1, 2, 3]

    @pytest.mark.full
    def test_metrics_of_an_earlier_run_are_removed_under_resume_never(self, tmp_path):
        fitted(shared_strategy(), steps=3, directory=tmp_path)
        _, recorder = fitted(shared_strategy(), steps=1, directory=tmp_path, resume="never")
        assert [line["step"] for line in json_lines(tmp_path)] == [1, 1]
        assert f"{tmp_path / 'checkpoints'}.before-1" in recorder.messages[0]


class TestSummary:
    TYPES = {
        "version": int,
        "outcome": str,
        "flags": dict,
        "engine": type(None),
        "versions": dict,
        "cpu_kernels": str,
        "devices": dict,
        "steps": int,
        "examples": int,
        "skipped_steps": int,
        "loss": float,
        "metrics": dict,
        "evaluation": dict,
        "images_per_second": float,
        "time_to_first_step_seconds": float,
        "training_seconds": float,
        "workers": dict,
        "parameter_servers": type(None),
        "straggler": type(None),
        "peak_memory_bytes": dict,
    }

    def test_fields(self, kept_run):
        summary = strict_json((kept_run.directory / "summary.json").read_text())
        assert {name: type(value) for name, value in summary.items()} == self.TYPES
        assert summary == kept_run.result.summary

    def test_values(self, kept_run):
        summary = kept_run.result.summary
        assert (summary["version"], summary["outcome"], summary["steps"]) == (1, "completed", 12)
        assert summary["examples"] == 2 * NUM_TRAIN + 2 * BATCH_SIZE
        assert summary["flags"] == {"learning_rate": 0.05}
        assert summary["versions"].keys() >= {"python", "towers", "tensorflow", "keras", "numpy"}
        assert summary["versions"]["towers"] == towers.__version__
        assert summary["versions"]["tensorflow"] == tf.__version__
        assert summary["versions"]["keras"] == keras.__version__
        assert summary["evaluation"].keys() == {"loss", "accuracy"}
        assert summary["images_per_second"] > 0
        assert 0 < summary["time_to_first_step_seconds"] <= summary["training_seconds"]
        assert summary["peak_memory_bytes"]["host"] > 100e6
        assert summary["devices"]["towers"][0] == "/device:CPU:0"
        assert (summary["devices"]["gpus"], summary["devices"]["parameters"]) == ([], None)

    def test_no_temporary_file_remains(self, kept_run):
        assert not list(kept_run.directory.glob("*.new"))

    def test_numbers_that_are_not_finite_are_null(self, tmp_path):
        """Finite steps can leave parameters that overflow in evaluation."""
        strategy = shared_strategy(schedule=_Jump(3))
        result, _ = fitted(strategy, steps=4, directory=tmp_path)
        assert not math.isfinite(result.evaluation["loss"])
        assert strict_json((tmp_path / "summary.json").read_text())["evaluation"]["loss"] is None
        assert json_lines(tmp_path)[-1]["loss"] is None


class TestFiles:
    def test_all_files_exist(self, kept_run):
        files = kept_run.result.files
        assert set(files) == {"checkpoint", "model", "metrics", "summary", "tensorboard"}
        assert pathlib.Path(f"{files['checkpoint']}.index").exists()
        assert all(files[name].exists() for name in files if name != "checkpoint")

    def test_tensorboard_scalars_and_graph(self, kept_run):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(kept_run.directory / "tensorboard"), size_guidance={"tensors": 0})
        events.Reload()
        lines = json_lines(kept_run.directory)

        def scalars(tag):
            return {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)}

        for kind, prefix, names in (
            ("train", "train", ("loss", "accuracy", "learning_rate", "gradient_norm")),
            ("evaluation", "evaluation", ("loss", "accuracy")),
            ("train", "speed", ("images_per_second",)),
        ):
            for name in names:
                expected = {line["step"]: line[name] for line in lines if line["kind"] == kind}
                assert scalars(f"{prefix}/{name}") == pytest.approx(expected, rel=1e-6)
        assert all(0 <= value <= 1 for value in scalars("speed/input_fraction").values())
        graph = events.Graph()
        assert len(graph.node) + sum(len(function.node_def) for function in graph.library.function) > 100

    def test_tensorboard_draws_no_curve_twice_after_a_run_that_failed_resumed(self, tmp_path):
        """The first run ends at step 6, with a checkpoint of step 4. TensorBoard's own reader reads the files."""
        from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

        options = {"directory": tmp_path, "steps": 9, "report_every_steps": 1, "checkpoint_every_steps": 4}
        options |= {"evaluate_every_epochs": None, "evaluate_every_steps": 2}
        with pytest.raises(Failure):
            fitted(shared_strategy(), callbacks=[Failing("steps", at=6)], **options)
        (file,) = (tmp_path / "tensorboard").iterdir()
        while time.time() < int(file.name.split(".")[3]) + 1:
            time.sleep(0.01)  # TensorBoard orders files by the second in their names
        fitted(shared_strategy(), **options)
        events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
        events.Reload()

        def steps(tag):
            return [event.step for event in events.Tensors(tag)]

        assert steps("train/loss") == [*range(1, 10)]
        assert steps("speed/images_per_second") == [*range(1, 10)]
        assert steps("evaluation/loss") == [2, 4, 6, 8, 9]

    def test_profile(self, kept_run):
        found = list((kept_run.directory / "profile").rglob("*.xplane.pb"))
        assert found
        assert all(path.stat().st_size > 1000 for path in found)

    @pytest.mark.parametrize("first, last", first_quick([(12, 14), (20, 30)]))
    def test_a_profile_of_steps_after_the_last_is_refused(self, first, last, tmp_path):
        strategy = shared_strategy()
        with refused(f"profile_steps={first}:{last}", "this run has steps 0 to 11"):
            fitted(strategy, callbacks=[Profiler(first, last)], steps=12, directory=tmp_path)
        assert strategy.step == 0

    @pytest.mark.parametrize("first, last", [(3, 3), (5, 2), (-1, 2)])
    def test_a_profile_of_no_steps_is_refused(self, first, last):
        with refused(f"profile_steps={first}:{last}", "0 <= FIRST < LAST"):
            Profiler(first, last)

    def test_a_profile_without_a_directory_is_refused(self):
        with refused("profile_steps=0:2", "directory"):
            fitted(shared_strategy(), callbacks=[Profiler(0, 2)], steps=3)

    def test_dry_run_writes_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run").mkdir()
        before = listing(tmp_path)
        result, recorder = fitted(shared_strategy(), epochs=50, directory=tmp_path / "run", dry_run=True)
        assert (result.completed, result.step, list(recorder.evaluations)) == (True, 2, [2])
        assert result.files == {}
        assert listing(tmp_path) == before

    def test_a_dry_run_from_a_checkpoint_takes_two_more_steps(self, tmp_path):
        fitted(shared_strategy(), steps=3, directory=tmp_path)
        saved = tmp_path / "checkpoints"
        result, recorder = fitted(shared_strategy(), epochs=50, dry_run=True, resume=saved)
        assert (result.completed, result.step, list(recorder.evaluations)) == (True, 5, [5])
        assert recorder.messages[-1] == "resumed at step 3 of 5"

    @pytest.mark.full
    def test_dry_run_leaves_an_earlier_run_alone(self, kept_run):
        before = listing(kept_run.directory)
        options = dataclasses.asdict(kept_run.options) | {"dry_run": True}
        result, _ = fitted(small_strategy(random_task()), **options)
        assert result.step == 2
        assert listing(kept_run.directory) == before


class TestCallbacks:
    @pytest.mark.parametrize("method", first_quick(["steps", "before_steps", "evaluation", "boundaries", "end"]))
    def test_end_of_every_callback_is_called_when_one_fails(self, method, tmp_path):
        first, last = Recorder(), Recorder()
        trainer = Trainer(
            shared_strategy(),
            TrainerOptions(steps=2, directory=tmp_path),
            callbacks=[first, Failing(method), last],
        )
        with pytest.raises(Failure):
            trainer.fit()
        assert (first.ended, last.ended) == (1, 1)
        outcome = strict_json((tmp_path / "summary.json").read_text())["outcome"]
        assert outcome == ("completed" if method == "end" else "failed")

    @pytest.mark.parametrize("returned", [("2", "3"), "23", 2, None, (2.5,)])
    def test_boundaries_that_are_no_steps_are_refused(self, returned):
        callback, last = Recorder(), Recorder()
        callback.boundaries = lambda: returned
        with refused("Recorder.boundaries()", f"returned {returned!r}", "return for example (10, 20)"):
            Trainer(shared_strategy(), TrainerOptions(steps=2), callbacks=[callback, last]).fit()
        assert (callback.ended, last.ended) == (1, 1)

    def test_callbacks_that_began_end_when_one_fails_to_begin(self):
        first, last = Recorder(), Recorder()
        trainer = Trainer(shared_strategy(), TrainerOptions(steps=2), callbacks=[first, Failing("begin"), last])
        with pytest.raises(Failure):
            trainer.fit()
        assert (first.ended, last.ended) == (1, 0)

    def test_end_of_every_callback_is_called_when_a_step_fails(self, monkeypatch):
        strategy, recorder = shared_strategy(), Recorder()

        def run_steps(count):
            raise Failure

        monkeypatch.setattr(strategy, "run_steps", run_steps)
        with pytest.raises(Failure):
            Trainer(strategy, TrainerOptions(steps=2), callbacks=[recorder]).fit()
        assert recorder.ended == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_something_else_in_a_files_place_is_one_line(tmp_path, name):
    if name == "tensorboard":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    with refused(str(tmp_path / name), "can't be written"):
        fitted(shared_strategy(), steps=1, directory=tmp_path)


def test_a_model_that_no_run_exported_stays(tmp_path):
    model = tmp_path / "model.keras"
    model.write_text("mine")
    with refused(str(model), "no run exported", "another directory"):
        fitted(shared_strategy(), steps=1, directory=tmp_path)
    assert listing(tmp_path) == [(str(model), 4)]
    model.unlink()
    for steps in (1, 2):
        fitted(shared_strategy(), steps=steps, directory=tmp_path)
    assert model.stat().st_size > 4


class TestFullDisk:
    """The disk becomes full during training."""

    TASK = small_task(width=256)

    @pytest.fixture
    def disk(self, small_disk):
        return small_disk(2048)

    @pytest.mark.full
    @pytest.mark.parametrize("report_every_steps", [3, 1])
    def test_the_error_is_one_line_and_the_checkpoint_before_remains(self, disk, fill, report_every_steps):
        """The disk is full from step 3 on; a checkpoint of about 230 KB is due at step 6."""
        expected = {}
        strategy = shared_strategy(task=self.TASK)
        options = {
            "steps": 9,
            "directory": disk / "run",
            "checkpoint_every_steps": 3,
            "report_every_steps": report_every_steps,
            "evaluate_every_epochs": None,
        }

        class Filler(Callback):
            """Fills the disk after the checkpoint of step 3 was saved."""

            def boundaries(self):
                return (3,)

            def steps(self, report):
                if report.step == 3:
                    expected.update(values_of(strategy))

            def before_steps(self, step):
                if step == 3:
                    fill(disk / "filler")

        with refused(str(disk), "make room"):
            fitted(strategy, callbacks=[Filler()], **options)
        assert not list((disk / "run").glob("*.new"))
        names = sorted(path.name for path in (disk / "run" / "checkpoints").iterdir())
        assert names == ["checkpoint", "step-3.data-00000-of-00001", "step-3.index"]
        (disk / "filler").unlink()
        again = small_strategy(self.TASK)
        assert Checkpoints(disk / "run" / "checkpoints", again).restore_latest() == 3
        assert_same_bits(values_of(again), expected)
        result, recorder = fitted(shared_strategy(task=self.TASK), **options)
        assert result.completed
        assert recorder.calls[0][0] == 3

    @pytest.mark.parametrize("is_resumed", [False, True])
    def test_a_disk_that_is_full_before_the_first_step(self, disk, fill, is_resumed):
        options = {"directory": disk / "run", "evaluate_every_epochs": None}
        if is_resumed:
            fitted(shared_strategy(), steps=1, **options)
        trainer = Trainer(shared_strategy(), TrainerOptions(steps=3, **options))
        trainer.prepare()
        fill(disk / "filler")
        with refused(str(disk / "run"), "can't be written", "make room"):
            trainer.fit()

    def test_a_profile_that_cannot_be_written(self, disk, fill):
        class Filler(Callback):
            def before_steps(self, step):
                if step == 2:
                    fill(disk / "filler")

        with refused(str(disk / "run" / "profile"), "make room"):
            fitted(shared_strategy(), callbacks=[Profiler(1, 3), Filler()], steps=4, directory=disk / "run")

    @pytest.mark.full
    def test_the_error_of_tensorboards_events_is_one_line(self, disk, fill):
        events = TensorBoardLog()
        events.begin(types.SimpleNamespace(strategy=None, directory=disk, first_step=0))
        fill(disk / "filler")
        with refused(str(disk / "tensorboard"), "make room"):
            # More bytes than fit into the rest of the file's last page.
            for step in range(200):
                events.evaluation(step, {"accuracy": 0.5})
        events.end()
