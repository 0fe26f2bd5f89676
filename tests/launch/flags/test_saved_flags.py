"""The flags of a run, as programs that read its checkpoint load them."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import train  # noqa: F401, defines the flags
from launch.flags.saved_flags import FLAG_FILE, load_flags, saved_precision
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
