"""The flags of a run, as programs that read its checkpoint load them."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags.belonging import check_belonging
from launch.flags.saved_flags import FLAG_FILE, load_flags, save_flags, saved_precision
from tests.towers.user_errors import refused

GRID = "stage:2"


@pytest.mark.parametrize("strategy, grid", [("ring", None), ("pipeline", GRID)])
def test_the_grid_of_a_run_of_several_processes_is_not_that_of_one(tmp_path, strategy, grid):
    """Programs read a ring's checkpoints with towers of one device each, which have no grid."""
    (tmp_path / FLAG_FILE).write_text(f"--task=text\n--grid={GRID}\n--microbatches=4\n--strategy={strategy}\n")
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        load_flags(str(tmp_path))
        assert flags.FLAGS.grid == grid
        assert flags.FLAGS.strategy == ("towers" if grid is None else strategy)


def test_what_only_training_uses_does_not_forbid_other_flags(tmp_path):
    """For example --strategy=mirrored and --accumulation=2, which exclude several steps in an execution."""
    (tmp_path / FLAG_FILE).write_text("--task=text\n--steps_per_execution=8\n")
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        load_flags(str(tmp_path))
        assert flags.FLAGS.task == "text"
        assert flags.FLAGS.steps_per_execution == 0


@pytest.mark.parametrize(
    "given, saved, found",
    [
        ("--num_towers=1", {"grid": "data:2,slice:2"}, {"grid": None, "num_towers": 1}),
        ("--num_towers=1", {"tower_shares": "3,1"}, {"tower_shares": None}),
        (
            "--slices=4",
            {"grid": "slice:2", "layout": "a=whole"},
            {"grid": None, "slices": 4, "layout": ["a=whole"]},
        ),
        (
            "--grid=slice:4",
            {"slices": "2", "num_towers": "2"},
            {"grid": "slice:4", "slices": None, "num_towers": None},
        ),
        ("--strategy=towers", {"slices": "2", "tower_shares": "3,1"}, {"slices": None, "tower_shares": None}),
        ("--strategy=pipeline", {"offload": "optimizer", "zero": "1"}, {"offload": "", "zero": 0}),
        ("--strategy=pipeline", {"batch_stats": "synced"}, {"batch_stats": "average"}),
        (
            "--zero=1",
            {"parameter_device": "cpu", "offload": "optimizer"},
            {"parameter_device": "auto", "offload": ""},
        ),
        ("--parameter_device=cpu", {"zero": "1"}, {"zero": 0}),
        ("--offload=optimizer", {"zero": "1"}, {"zero": 0}),
        ("--num_towers=1", {"parameter_device": "cpu:1"}, {"parameter_device": "auto"}),
        ("--num_towers=1", {"zero": "1", "grid": "data:2,slice:2"}, {"zero": 0, "grid": None}),
        ("--grid=slice:4", {"zero": "3", "num_towers": "2"}, {"zero": 0}),
        ("--grid=data:4,slice:2", {"zero": "3", "num_towers": "2"}, {"zero": 3}),
        ("--slices=4", {"zero": "1", "grid": "data:2,slice:2"}, {"zero": 0}),
        ("--slices=4", {"zero": "1", "num_towers": "2"}, {"zero": 1}),
        ("--slices=2", {"recipe": "cifar_fast", "momentum": "0.5"}, {"recipe": None, "momentum": 0.5}),
    ],
)
def test_a_flag_of_the_command_line_replaces_those_of_the_run_that_would_contradict_it(
    tmp_path, given, saved, found
):
    lines = ["--task=text", "--strategy=slices", *(f"--{name}={value}" for name, value in saved.items())]
    (tmp_path / FLAG_FILE).write_text("\n".join(lines) + "\n")
    with flagsaver.flagsaver():
        flags.FLAGS(["program", given])
        load_flags(str(tmp_path))
        assert {name: flags.FLAGS[name].value for name in found} == found


def test_a_loaded_flag_is_not_one_of_the_command_line(tmp_path):
    """Otherwise flags of the run that have no effect in this program, as --staleness, would be refused."""
    (tmp_path / FLAG_FILE).write_text("--task=text\n--strategy=ps\n--staleness=2\n")
    with flagsaver.flagsaver():
        flags.FLAGS(["program", "--text_length=8"])
        load_flags(str(tmp_path))
        assert [name for name in flags.FLAGS if flags.FLAGS[name].present] == ["text_length"]
        check_belonging()


def test_flags_that_this_version_lacks_are_named_in_one_warning(tmp_path, capsys):
    (tmp_path / FLAG_FILE).write_text("--task=text\n\n--gone=3\n--gone_too=a=b\n")
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        load_flags(str(tmp_path))
        assert flags.FLAGS.task == "text"
    (line,) = capsys.readouterr().err.splitlines()
    assert f": warning: {tmp_path}/{FLAG_FILE}: this version has no --gone=3, --gone_too=a=b; left out" in line


@pytest.mark.parametrize(
    "given, saved",
    [
        ("--data_dir=../data", "--data_dir={parent}/data"),
        ("--data_dir=gs://bucket/data", "--data_dir=gs://bucket/data"),
        ("--pipeline_schedule=a.csv", "--pipeline_schedule={folder}/a.csv"),
        ("--pipeline_schedule=gpipe", "--pipeline_schedule=gpipe"),
    ],
)
def test_paths_are_saved_so_that_they_hold_in_any_folder(tmp_path, monkeypatch, given, saved):
    monkeypatch.chdir(tmp_path)
    with flagsaver.flagsaver():
        flags.FLAGS(["program", given])
        save_flags(tmp_path)
    lines = (tmp_path / FLAG_FILE).read_text().splitlines()
    assert saved.format(folder=tmp_path, parent=tmp_path.parent) in lines


def test_a_run_of_a_users_own_program_is_not_read_as_the_default_task(tmp_path):
    (tmp_path / FLAG_FILE).write_text("--strategy=towers\n--num_towers=2\n")
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        with refused(f"--directory={tmp_path} ", "program of your own", "no task", f"{tmp_path}/model.keras"):
            load_flags(str(tmp_path))


@pytest.mark.parametrize(
    "contents, parts",
    [
        (b"--task=text\n--batch_size=many\n", ("--batch_size=many", "correct this line")),
        (b"--task=text\n--precision=float7\n", ("--precision=float7", "correct this line")),
        (b"\xff\xfe\x00", ("can't be read",)),
    ],
)
def test_a_file_of_flags_that_was_changed_is_refused(tmp_path, contents, parts):
    (tmp_path / FLAG_FILE).write_bytes(contents)
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        with refused(f"{tmp_path}/{FLAG_FILE}: ", *parts):
            load_flags(str(tmp_path))


def test_a_folder_that_cannot_be_read_is_refused(tmp_path):
    """Stands for a folder that this user may not enter; this one fails for root too."""
    folder = tmp_path / ("x" * 300)
    for read in (load_flags, lambda given: saved_precision(tmp_path / given)):
        with refused(f"{folder}/{FLAG_FILE}: can't be read", "too long"):
            read(str(folder))
