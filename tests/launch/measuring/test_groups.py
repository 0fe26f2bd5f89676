"""The rows of each --group: unique names, this project's first, the peers' with their own flags."""

import pathlib
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

import launch.benchmark  # noqa: F401 (defines the flags)
from launch.measuring.gpu_cases import num_gpus
from launch.measuring.groups import GROUPS, cases
from tests.towers.user_errors import refused

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
        "keras ring 2",
        "keras ring 2, bfloat16",
        "torch, 2 processes",
        "torch, 2 processes, bfloat16",
    ]
    shared = (str(peers / "torch_step.py"), "--batch=256", "--steps=20", "--procs", "2")
    for name, precision in (("torch, 2 processes", "float32"), ("torch, 2 processes, bfloat16", "bfloat16")):
        assert found[name] == (precision, ("python-of-torch", *shared, "--dtype", precision))


def test_both_engines_stand_beside_the_peer_for_each_number_of_processes(peers):
    with flagsaver.flagsaver(processes=["2", "3"]):
        names = {group: [row.name for row in GROUPS[group]()] for group in ("engines_ring", "engines_servers")}
        counts = [(row.processes, row.num_processes) for row in GROUPS["engines_servers"]()]
    assert names["engines_ring"] == [
        *("ring 2, tensorflow", "ring 2, own", "keras ring 2"),
        *("ring 3, tensorflow", "ring 3, own", "keras ring 3"),
    ]
    assert names["engines_servers"][:3] == ["ps 2, tensorflow", "ps 2, own", "keras ps 2"]
    assert counts[3:] == [({"chief": 1, "worker": 3, "ps": 1}, 1)] * 2 + [({}, 5)]


def test_training_flags_of_the_command_line_go_to_our_rows_before_their_own(peers):
    given = {"recompute": "full", "tf32": False, "zero": 2}
    with flagsaver.flagsaver(**given):
        for name in given:
            FLAGS[name].present = 1
        rows = GROUPS["sharded"]()
    assert set(rows[0].work.flags.split()) == {"--recompute=full", "--notf32", "--zero=2"}
    zeros = [word for word in rows[-2].command if word.startswith("--zero=")]
    assert zeros == ["--zero=2", "--zero=3"], "the last one counts"


def test_each_precision_of_cifar_fast_has_its_peer_without_a_folder_of_peers(peers):
    with flagsaver.flagsaver(peers=None, measured_steps=7):
        rows = GROUPS["cifar_fast"]()
    compared = [(row.work.strategy, row.work.network, row.work.batch, row.work.precision) for row in rows]
    assert compared == [
        (strategy, "cifar_fast", 1024, precision)
        for precision in ("float32", "bfloat16")
        for strategy in ("towers", "torch")
    ]
    python, program, *options = rows[3].command
    assert python == "python-of-torch"
    assert pathlib.Path(program).exists()
    assert options == ["--batch=1024", "--steps=7", "--precision=bfloat16", "--device=cpu"]


@pytest.mark.parametrize("group", ["cifar_fast", "kinds_of_cpu"])
def test_a_precision_that_is_left_out_has_no_peer(peers, group):
    """With AVX2 alone, PyTorch's bfloat16 takes minutes, and there is no row to compare it with."""
    with flagsaver.flagsaver(isa="avx2"):
        measured = [(row.work.strategy, row.work.precision) for row in GROUPS[group]() if not row.left_out]
    assert measured == [("towers", "float32"), ("torch", "float32")]


def test_a_link_is_part_of_the_work_and_of_the_name_of_rows_of_several_processes(peers):
    with flagsaver.flagsaver(link="100mbit"):
        rows = {row.name: row for row in GROUPS["ring"]()}
    links = {name: row.work.link for name, row in rows.items()}
    assert links["ring 2, own, 100mbit"] == links["keras ring 2, 100mbit"] == "100mbit"
    assert links["towers 1"] == "none"
    assert [name for name, row in rows.items() if row.left_out] == [
        "torch, 2 processes, 100mbit",
        "torch, 2 processes, bfloat16, 100mbit",
    ]
    assert "127.0.0.1" in rows["torch, 2 processes, 100mbit"].left_out


@pytest.mark.parametrize("group, num_peers", [("engines_ring", 2), ("engines_servers", 2), ("towers", 4)])
def test_a_peer_without_the_network_is_left_out(peers, group, num_peers):
    with flagsaver.flagsaver(network="vgg16"):
        reasons = [row.left_out for row in GROUPS[group]() if row.is_peer]
    assert len(reasons) == num_peers
    assert all("has no vgg16, only" in reason for reason in reasons)


@pytest.mark.parametrize(
    "rows, words",
    [
        (["towers,2,resnet21"], "network 'resnet21' must be one of tiny, classic_cnn,"),
        (["towers,2,tiny,8,float8"], "precision 'float8' must be one of float32,"),
        (["towers,2", "towers,2,resnet20,256"], "the row 'towers 2, resnet20, 256, float32' is given twice"),
    ],
)
def test_a_mistake_in_a_row_is_reported_before_anything_is_measured(peers, rows, words):
    with flagsaver.flagsaver(row=rows), refused("--row", words):
        cases()


@pytest.mark.parametrize("given", [["1"], ["two"], []])
def test_processes_must_be_numbers_from_two_on(peers, given):
    with flagsaver.flagsaver(processes=given), refused("--processes=", "at least 2", "give for example 2,4"):
        GROUPS["engines_ring"]()


def test_pipelines_stand_beside_one_device_with_the_same_microbatches(peers):
    alone, *rows = GROUPS["pipeline"]()
    assert {"--num_towers=1", "--threads_per_tower=1", "--accumulation=8"} <= set(alone.command)
    assert [row.name for row in rows] == [
        f"pipeline 2, {name}" for name in ("gpipe", "1f1b", "zb_h1", "interleaved")
    ]
    assert all({"--microbatches=8", "--threads_per_tower=1"} <= set(row.command) for row in rows)
    # GPipe's bubble of 8 microbatches on 2 devices is 1/9.
    assert rows[0].work.allowed_speedup == pytest.approx(2 * 8 / 9)


def test_all_that_is_for_larger_models_is_measured_once(peers):
    parts = [row.command for group in ("pipeline", "sharded", "ring_zero", "recompute") for row in GROUPS[group]()]
    commands = [row.command for row in GROUPS["larger_than_a_device"]()]
    assert len(set(commands)) == len(commands) == len(parts) - 1


def test_the_group_gpu_needs_one(peers):
    """Without a GPU the group is refused in one line; its rows ask for GPUs by name."""
    rows = GROUPS["gpu"]()
    assert all("--tower_device=gpu" in row.command for row in rows if not row.is_peer)
    peers_of_torch = [row for row in rows if row.work.strategy == "torch"]
    assert ["--device=cuda" in row.command for row in peers_of_torch] == [True]
    assert [row.work.precision for row in rows if row.work.strategy == "keras fit"] == ["float32", "bfloat16"]
    # A batch that keeps a GPU busy is large for a CPU.
    assert {row.work.batch for row in rows} == {1024, 1024 * max(1, num_gpus())}
    if num_gpus() == 0:
        with flagsaver.flagsaver(group="gpu"), refused("--group=gpu", "no GPU"):
            cases()


@pytest.mark.parametrize(
    "torch, expected",
    [
        ("", "PyTorch of {python} finds no GPU"),
        (
            "raise ModuleNotFoundError('no torch')",
            "PyTorch of {python} finds no GPU: ModuleNotFoundError: no torch",
        ),
    ],
)
def test_pytorch_that_finds_no_gpu_is_left_out_of_the_group_gpu(peers, tmp_path, torch, expected):
    """If its row failed, the rows after it would not be measured."""
    (tmp_path / "torch.py").write_text(
        f"import types\n{torch}\ncuda = types.SimpleNamespace(is_available=lambda: False)\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with flagsaver.flagsaver(torch=str(python)):
        (row,) = (row for row in GROUPS["gpu"]() if row.work.strategy == "torch")
        assert row.left_out == expected.format(python=python)
        assert not any(row.left_out for row in GROUPS["cifar_fast"]())
