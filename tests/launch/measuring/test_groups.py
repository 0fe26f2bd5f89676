"""The rows of each --group: unique names, this project's first, the peers' with their own flags."""

import pytest
from absl import flags
from absl.testing import flagsaver

import launch.benchmark  # noqa: F401 (defines the flags)
from launch.measuring.groups import GROUPS

FLAGS = flags.FLAGS


@pytest.fixture
def peers(tmp_path):
    """A folder of peer programs, and flags that name it and a Python interpreter with torch."""
    for program in ("keras_step.py", "torch_step.py", "ps_step.py"):
        (tmp_path / program).touch()
    if not FLAGS.is_parsed():
        FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(peers=str(tmp_path), torch="python-of-torch"):
        yield tmp_path


@pytest.mark.parametrize("group", GROUPS)
def test_names_are_unique_and_this_projects_row_is_first(peers, group):
    rows = GROUPS[group]()
    assert len({row.name for row in rows}) == len(rows)
    assert not rows[0].is_peer


def test_the_peers_of_a_ring_have_both_precisions(peers):
    found = {row.name: (row.work.precision, row.command) for row in GROUPS["ring"]() if row.is_peer}
    assert list(found) == [
        "keras ring",
        "keras ring, bfloat16",
        "torch, 2 processes",
        "torch, 2 processes, bfloat16",
    ]
    shared = (str(peers / "torch_step.py"), "--batch=256", "--steps=20", "--procs", "2")
    assert found["torch, 2 processes"] == ("float32", ("python-of-torch", *shared))
    assert found["torch, 2 processes, bfloat16"] == (
        "bfloat16",
        ("python-of-torch", *shared, "--dtype", "bfloat16"),
    )
