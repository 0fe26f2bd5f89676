"""Checkpoints are saved atomically, and the newest readable one is restored."""

import collections
import contextlib
import functools
import itertools
import logging
import os
import pathlib
import shutil
import subprocess
import threading

import numpy as np
import pytest
import tensorflow as tf

from strategies.training.checkpoints import Checkpoints
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import (
    assert_same_bits,
    shared_strategy,
    small_strategy,
    small_task,
    values_of,
)
from tests.tiers import first_quick
from tests.towers.user_errors import refused
from towers.errors import UserError
from towers.precision import LossScaling
from towers.updates.rules import SGD, Adam, Momentum

BATCH_NORM_TASK = small_task(batch_norm=True)
STEPS = (2, 4, 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory with checkpoints of STEPS, values of the variables at each of these steps)."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    strategy = fresh_strategy()
    checkpoints = Checkpoints(directory, strategy)
    checkpoints.prepare()
    values = {}
    for step in STEPS:
        strategy.run_steps(step - strategy.step)
        checkpoints.save()
        values[step] = values_of(strategy)
    return directory, values


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the directory, which a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "checkpoints")


def fresh_strategy(**options):
    return shared_strategy(task=BATCH_NORM_TASK, num_towers=2, **options)


def data_file(directory, step) -> pathlib.Path:
    return directory / f"step-{step}.data-00000-of-00001"


def index_file(directory, step) -> pathlib.Path:
    return directory / f"step-{step}.index"


def cut_data_in_half(directory, step):
    path = data_file(directory, step)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_one_byte_of_data(directory, step):
    content = bytearray(data_file(directory, step).read_bytes())
    content[len(content) // 2] ^= 0x10
    data_file(directory, step).write_bytes(content)


def remove_data(directory, step):
    data_file(directory, step).unlink()


def empty_data(directory, step):
    data_file(directory, step).write_bytes(b"")


def fill_index_with_garbage(directory, step):
    index_file(directory, step).write_bytes(b"\x93garbage\n" * 100)


def cut_index_in_half(directory, step):
    path = index_file(directory, step)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_index(directory, step):
    index_file(directory, step).write_bytes(b"")


DAMAGES = (
    cut_data_in_half,
    change_one_byte_of_data,
    remove_data,
    empty_data,
    fill_index_with_garbage,
    cut_index_in_half,
    empty_index,
)
every_damage = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)


@every_damage
def test_if_the_newest_checkpoint_is_damaged_the_one_before_is_used(copied, saved, damage, caplog):
    damage(copied, 6)
    strategy = fresh_strategy()
    with caplog.at_level(logging.WARNING, logger="strategies.training.checkpoints"):
        assert Checkpoints(copied, strategy).restore_latest() == 4
    [report] = caplog.messages
    assert str(copied / "step-6") in report
    assert "trying the one before it" in report
    assert "\n" not in report
    assert_same_bits(values_of(strategy), saved[1][4])


def test_if_two_checkpoints_are_damaged_the_third_is_used(copied, saved, caplog):
    fill_index_with_garbage(copied, 6)
    cut_data_in_half(copied, 4)
    strategy = fresh_strategy()
    assert Checkpoints(copied, strategy).restore_latest() == 2
    assert len(caplog.messages) == 2
    assert_same_bits(values_of(strategy), saved[1][2])


@pytest.mark.full
def test_the_state_file_of_tensorflow_is_not_needed(copied):
    (copied / "checkpoint").write_bytes(b"garbage")
    strategy = fresh_strategy()
    checkpoints = Checkpoints(copied, strategy)
    assert checkpoints.restore_latest() == 6
    strategy.run_steps(1)
    checkpoints.save()
    assert Checkpoints(copied, fresh_strategy()).restore_latest() == 7


def test_no_readable_checkpoint_is_an_error(copied):
    for step, damage in zip(STEPS, DAMAGES, strict=False):
        damage(copied, step)
    with refused(str(copied), "none of its 3 checkpoints can be read", "resume='never'"):
        Checkpoints(copied, fresh_strategy()).restore_latest()


def test_only_data_without_an_index_is_an_error_and_stays(copied, tmp_path):
    for step in STEPS:
        index_file(copied, step).unlink()
    names = sorted(path.name for path in copied.iterdir())
    strategy = fresh_strategy()
    with refused(str(copied), "remains of checkpoints at steps 6, 4, 2", "none can be read", "resume='never'"):
        Trainer(strategy, TrainerOptions(steps=1, directory=tmp_path)).fit()
    assert strategy.step == 0
    assert sorted(path.name for path in copied.iterdir()) == names
    Trainer(strategy, TrainerOptions(steps=1, directory=tmp_path, resume="never")).fit()
    assert sorted(path.name for path in (tmp_path / "checkpoints.before-1").iterdir()) == names


def test_if_only_tensorflows_file_remains_it_is_an_error(copied):
    for path in copied.glob("step-*"):
        path.unlink()
    with refused(str(copied), "remains of checkpoints at steps 6:", "none can be read"):
        Checkpoints(copied, fresh_strategy()).restore_latest()


@pytest.mark.full
@pytest.mark.parametrize("with_data", [True, False])
def test_if_the_newest_index_is_missing_that_is_reported_and_its_data_stays(copied, with_data, caplog):
    index_file(copied, 6).unlink()
    if not with_data:
        data_file(copied, 6).unlink()
    strategy = fresh_strategy()
    checkpoints = Checkpoints(copied, strategy, keep=1)
    assert checkpoints.restore_latest() == 4
    [report] = caplog.messages
    assert f"checkpoint {copied / 'step-6'} has no index" in report
    assert "trying the one before it" in report
    checkpoints.prepare()
    strategy.run_steps(1)
    checkpoints.save()
    assert data_file(copied, 6).exists() is with_data
    assert {path.stem for path in copied.glob("*.index")} == {"step-5"}


def test_an_empty_directory_restores_nothing(tmp_path):
    assert Checkpoints(tmp_path / "nowhere", fresh_strategy()).restore_latest() is None
    assert not (tmp_path / "nowhere").exists()


def test_a_wider_network_is_another_model(copied):
    wider = small_strategy(small_task(batch_norm=True, width=12))
    with refused("parameters/hidden0/kernel", "[108, 8]", "[108, 12]", "use the same model", "another directory"):
        Checkpoints(copied, wider).restore_latest()


def test_a_deeper_network_is_another_model(copied):
    deeper = small_strategy(small_task(batch_norm=True, depth=2))
    with refused("parameters/hidden1/kernel", "absent in it", "[8, 8]", "use the same model"):
        Checkpoints(copied, deeper).restore_latest()


def test_a_network_of_fewer_layers_is_another_model(copied):
    with refused("parameters/norm0/gamma", "[8] in it", "absent here", "use the same model"):
        Checkpoints(copied, shared_strategy()).restore_latest()


def test_another_model_leaves_the_strategy_as_it_was(copied):
    wider = small_strategy(small_task(batch_norm=True, width=12))
    before = values_of(wider)
    with pytest.raises(UserError):
        Checkpoints(copied, wider).restore_latest()
    assert_same_bits(values_of(wider), before)


@pytest.mark.parametrize("rule, slot", [(Adam(), "first_moment"), (SGD(), "momentum")], ids=["adam", "sgd"])
def test_another_optimizer_is_refused(copied, rule, slot):
    with refused(f"slots/{slot}", "use the same optimizer"):
        Checkpoints(copied, fresh_strategy(rule=rule)).restore_latest()


def test_other_options_of_the_same_optimizer_are_accepted(copied):
    assert Checkpoints(copied, fresh_strategy(rule=Momentum(nesterov=True))).restore_latest() == 6


@pytest.mark.parametrize(
    "path, step",
    [("", 6), ("step-4", 4), ("step-4.index", 4), ("step-2.data-00000-of-00001", 2)],
    ids=["directory", "prefix", "index", "data"],
)
def test_a_path_may_be_a_directory_a_prefix_or_a_file(copied, saved, tmp_path, path, step):
    strategy = fresh_strategy()
    elsewhere = Checkpoints(tmp_path / "elsewhere", strategy)
    assert elsewhere.restore_from(copied / path) == step == strategy.step
    assert_same_bits(values_of(strategy), saved[1][step])
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_checkpoint_of_another_precision_is_cast(copied, saved, precision):
    strategy = fresh_strategy(precision=precision)
    assert Checkpoints(copied, strategy).restore_latest() == STEPS[-1]
    found, stored = values_of(strategy), saved[1][STEPS[-1]]
    assert found.keys() == stored.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value.astype("float32"), stored[name].astype("float32"), err_msg=name)


def resumed(directory, precision: str, before: str, state: tuple[float, int] | None = None):
    """Loss scale and good steps of a run that resumes a run of the precision `before`, which had `state`."""
    strategy = shared_strategy(precision=before)
    scale, good_steps = (strategy.checkpointables()["counters"][name] for name in ("loss_scale", "good_steps"))
    if state is not None:
        scale.assign(state[0])
        good_steps.assign(state[1])
    Checkpoints(directory, strategy).save()
    strategy = shared_strategy(precision=precision)
    Checkpoints(directory, strategy).restore_latest()
    counters = strategy.checkpointables()["counters"]
    return counters["loss_scale"].numpy(), counters["good_steps"].numpy()


@pytest.mark.full
@pytest.mark.parametrize("state", [(1.0, 0), (1.0, 7), (2.0**20, 3)])
def test_a_float16_run_resumes_with_its_loss_scale(tmp_path, state):
    assert resumed(tmp_path, "float16", before="float16", state=state) == state


def test_a_run_of_another_precision_leaves_no_loss_scale(tmp_path):
    initial = LossScaling().initial, 0
    assert resumed(tmp_path, "float16", before="float32") == initial
    # A float32 run forgets the scale of the float16 run before it, so a later float16 run does not get it.
    assert resumed(tmp_path, "float32", before="float16", state=(2.0**20, 3))[0] == 1


def test_a_path_may_be_relative(copied, monkeypatch):
    monkeypatch.chdir(copied)
    assert Checkpoints("elsewhere", fresh_strategy()).restore_from("step-4") == 4


def test_a_missing_checkpoint_is_refused(copied):
    with refused(f"resume={copied / 'step-5'}", "no such checkpoint", "D/step-100"):
        Checkpoints(copied, fresh_strategy()).restore_from(copied / "step-5")


# Stand for a folder that this user may not enter; these fail for root too.
@pytest.mark.parametrize("name, parts", [("x" * 300, ("can't be read", "too long")), ("\udcff", ("in UTF-8",))])
def test_a_directory_that_cannot_be_read_is_refused(tmp_path, name, parts):
    strategy = fresh_strategy()
    with refused(*parts):
        Trainer(strategy, TrainerOptions(steps=1, directory=tmp_path / name)).fit()
    with refused("resume=", *parts):
        Checkpoints(tmp_path, strategy).restore_from(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_directory_without_checkpoints_is_refused(tmp_path):
    with refused(f"resume={tmp_path}", "this directory has no checkpoint; give another"):
        Checkpoints(tmp_path, fresh_strategy()).restore_from(tmp_path)


def test_the_directory_of_a_run_is_refused_by_the_name_of_its_checkpoints(copied):
    with refused(f"resume={copied.parent}: this directory has no checkpoint; use resume={copied}"):
        Checkpoints(copied, fresh_strategy()).restore_from(copied.parent)


@every_damage
def test_a_damaged_checkpoint_by_name_is_refused(copied, damage):
    damage(copied, 4)
    with refused(f"resume={copied / 'step-4'}", "the checkpoint can't be read", "give another one"):
        Checkpoints(copied, fresh_strategy()).restore_from(copied / "step-4")


def test_all_files_of_an_earlier_run_are_moved_away(copied):
    checkpoints = Checkpoints(copied, fresh_strategy())
    names = sorted(path.name for path in copied.iterdir())
    aside = checkpoints.files.set_aside()
    assert aside == copied.with_name("checkpoints.before-1")
    assert sorted(path.name for path in aside.iterdir()) == names
    assert not copied.exists()
    assert checkpoints.files.set_aside() is None
    shutil.copytree(aside, copied)
    assert checkpoints.files.set_aside() == copied.with_name("checkpoints.before-2")
    assert Checkpoints(aside, fresh_strategy()).restore_latest() == 6


def test_resume_never_starts_at_step_0_and_moves_the_earlier_run_away(copied, saved, tmp_path):
    options = TrainerOptions(steps=1, directory=tmp_path, resume="never")
    trainer = Trainer(fresh_strategy(), options)
    trainer.fit()
    saved_here = Checkpoints(copied, trainer.strategy).files.saved()
    assert [pathlib.Path(prefix).name for prefix in saved_here] == ["step-1"]
    earlier = fresh_strategy()
    assert Checkpoints(tmp_path / "checkpoints.before-1", earlier).restore_latest() == 6
    assert_same_bits(values_of(earlier), saved[1][6])


def test_only_the_newest_checkpoints_remain(tmp_path):
    strategy = shared_strategy()
    checkpoints = Checkpoints(tmp_path, strategy, keep=2)
    for _ in range(4):
        strategy.run_steps(1)
        checkpoints.save()
    assert {path.stem for path in tmp_path.glob("step-*")} == {"step-3", "step-4"}
    # A run that resumes also deletes the checkpoints of the run before.
    strategy.run_steps(1)
    Checkpoints(tmp_path, strategy, keep=2).save()
    assert {path.stem for path in tmp_path.glob("step-*")} == {"step-4", "step-5"}


@pytest.mark.full
def test_an_unreadable_later_checkpoint_does_not_count(copied):
    fill_index_with_garbage(copied, 6)
    strategy = fresh_strategy()
    checkpoints = Checkpoints(copied, strategy, keep=1)
    assert checkpoints.restore_latest() == 4
    strategy.run_steps(1)
    checkpoints.save()
    assert {path.stem for path in copied.glob("step-*")} == {"step-5", "step-6"}
    assert Checkpoints(copied, small_strategy(BATCH_NORM_TASK)).restore_latest() == 5
    strategy.run_steps(1)
    checkpoints.save()
    assert {path.stem for path in copied.glob("step-*")} == {"step-6"}
    assert Checkpoints(copied, fresh_strategy()).restore_latest() == 6


def test_tensorflow_finds_the_newest_checkpoint(saved):
    assert tf.train.latest_checkpoint(str(saved[0])) == str(saved[0] / "step-6")


class Killed(BaseException):
    """Stands for SIGKILL: code under test must not catch it."""


@pytest.mark.parametrize("moment", first_quick([6, 0, 1, 2, 3, 4, 5, 7, 8, 9, 10]))
def test_killed_while_saving(tmp_path, monkeypatch, moment):
    """After a kill at any system call, a run resumes from a complete checkpoint and removes all other files."""
    strategy = shared_strategy()
    checkpoints = Checkpoints(tmp_path, strategy, keep=1)
    strategy.run_steps(1)
    checkpoints.save()
    strategy.run_steps(1)
    calls = itertools.count()

    def dying(call):
        def die_or_call(*arguments, **options):
            if next(calls) == moment:
                raise Killed
            return call(*arguments, **options)

        return die_or_call

    with monkeypatch.context() as patch:
        for owner, name in ((os, "fsync"), (pathlib.Path, "replace"), (pathlib.Path, "unlink")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        with pytest.raises(Killed):
            checkpoints.save()
    again = shared_strategy()
    resumed = Checkpoints(tmp_path, again, keep=1)
    # The fifth of these calls moves the index; the first removes an older index of the same step.
    assert resumed.restore_latest() == (1 if moment <= 4 else 2)
    resumed.prepare()
    resumed.save()
    names = {path.name for path in tmp_path.iterdir()}
    step = f"step-{again.step}"
    assert names == {"checkpoint", f"{step}.index", data_file(tmp_path, again.step).name}


@pytest.mark.full
def test_a_reader_never_sees_half_an_index(tmp_path):
    """The reader looks again and again, as an evaluator does."""
    strategy = shared_strategy()
    checkpoints = Checkpoints(tmp_path, strategy, keep=1)
    done, sizes = threading.Event(), collections.defaultdict(set)

    def look():
        while not done.is_set():
            for path in tmp_path.glob("step-*.index"):
                with contextlib.suppress(FileNotFoundError):
                    sizes[path.name].add(path.stat().st_size)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(40):
            strategy.run_steps(1)
            checkpoints.save()
    finally:
        done.set()
        looking.join(20)
    assert len(sizes) > 20
    assert all(len(seen) == 1 for seen in sizes.values()), dict(sizes)


def test_keeping_no_checkpoint_is_refused(tmp_path):
    with refused("keep_checkpoints=0", "at least 1"):
        Checkpoints(tmp_path, shared_strategy(), keep=0)


@pytest.mark.parametrize(
    "name, num_towers", first_quick([("mirrored", 2), ("towers", 1), ("towers", 2), ("mirrored", 1)])
)
def test_a_checkpoint_of_two_towers_resumes_in_any_mode(saved, name, num_towers):
    strategy = shared_strategy(task=BATCH_NORM_TASK, name=name, num_towers=num_towers)
    assert Checkpoints(saved[0], strategy).restore_latest() == 6
    assert_same_bits(values_of(strategy), saved[1][6])
    report = strategy.run_steps(1)
    assert report.step == 7


@pytest.mark.full
def test_what_mirrored_saved_goes_on_under_towers(tmp_path):
    mirrored = shared_strategy(task=BATCH_NORM_TASK, name="mirrored", num_towers=2)
    mirrored.run_steps(3)
    Checkpoints(tmp_path, mirrored).save()
    towers = fresh_strategy()
    assert Checkpoints(tmp_path, towers).restore_latest() == 3
    assert_same_bits(values_of(towers), values_of(mirrored))


def test_a_directory_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    strategy = shared_strategy()
    with refused(str(tmp_path / "file" / "run"), "nothing can be written there", "another directory"):
        Trainer(strategy, TrainerOptions(steps=3, directory=tmp_path / "file" / "run")).fit()
    assert strategy.step == 0


def test_a_directory_that_cannot_be_made_is_refused():
    strategy = shared_strategy()
    with refused("/proc/run", "nothing can be written there"):
        Trainer(strategy, TrainerOptions(steps=3, directory="/proc/run")).fit()
    assert strategy.step == 0


def test_a_read_only_directory_is_refused(small_disk):
    disk = small_disk(256)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=20)
    strategy = shared_strategy()
    with refused(str(disk), "nothing can be written there (Read-only file system)"):
        Trainer(strategy, TrainerOptions(steps=3, directory=disk)).fit()
    assert strategy.step == 0


def test_files_of_an_unfinished_save_are_removed_at_start(copied):
    (copied / "step-8.new" / "step-8_temp").mkdir(parents=True)
    (copied / "step-8.new" / "step-8_temp" / "part-00000-of-00001.data-00000-of-00001").write_bytes(b"half")
    (copied / "step-8.new" / "step-8.index").write_bytes(b"")
    (copied / "checkpoint.new").write_bytes(b"half")
    (copied / "step-8.data-00000-of-00001").write_bytes(b"moved before the index")
    (copied / "notes.txt").write_text("somebody's own")
    checkpoints = Checkpoints(copied, fresh_strategy())
    checkpoints.prepare()
    assert sorted(path.name for path in copied.iterdir()) == [
        "checkpoint",
        "notes.txt",
        *(f"step-{step}.{end}" for step in STEPS for end in ("data-00000-of-00001", "index")),
    ]
    assert checkpoints.restore_latest() == 6


class TestFullDisk:
    """The network has about 120 KB, so that a checkpoint is much larger than a page of 4 KiB."""

    make = staticmethod(functools.partial(shared_strategy, task=small_task(width=128)))

    def test_free_space_is_checked_before_training(self, small_disk):
        disk = small_disk(128)
        strategy = self.make()
        with refused(str(disk), "bytes are free and a checkpoint needs about", "another directory"):
            Trainer(strategy, TrainerOptions(steps=3, directory=disk)).fit()
        assert strategy.step == 0
        assert not list(disk.rglob("step-*"))

    def test_the_size_is_within_a_tenth_of_the_files(self, tmp_path):
        checkpoints = Checkpoints(tmp_path, self.make())
        prefix = checkpoints.save()
        written = data_file(tmp_path, 0).stat().st_size + pathlib.Path(prefix + ".index").stat().st_size
        assert checkpoints.size_bytes() == pytest.approx(written, rel=0.1)

    def test_save_on_a_full_disk(self, small_disk, fill):
        """With any amount of free space, a failing save leaves the older checkpoint unchanged."""
        task = small_task(width=128)
        strategy = small_strategy(task)
        disk = small_disk(1024)
        checkpoints = Checkpoints(disk, strategy)
        checkpoints.prepare()
        strategy.run_steps(1)
        checkpoints.save()
        expected, names = values_of(strategy), sorted(path.name for path in disk.iterdir())
        strategy.run_steps(1)
        for free_kibibytes in (0, 4, 8, 60, 100, 112):
            fill(disk / "filler")
            with open(disk / "filler", "rb+") as filler:
                filler.truncate((disk / "filler").stat().st_size - free_kibibytes * 1024)
            with refused(str(disk), "step 2 can't be written", "earlier ones remain", "make room"):
                checkpoints.save()
            (disk / "filler").unlink()
            assert sorted(path.name for path in disk.iterdir()) == names, f"with {free_kibibytes} KiB free"
            again = self.make()
            assert Checkpoints(disk, again).restore_latest() == 1
            assert_same_bits(values_of(again), expected)
        assert pathlib.Path(checkpoints.save()).name == "step-2"
        assert Checkpoints(disk, self.make()).restore_latest() == 2
