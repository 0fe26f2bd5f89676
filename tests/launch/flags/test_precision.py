"""--precision=auto becomes one precision, the same in every file; a run says what a slow precision costs."""

import json
import re

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

import launch.training  # noqa: F401 (defines the flags)
from launch.flags import precision as resolving
from tests.launch.nursery import run_forked
from tests.launch.programs import LIMIT_SECONDS
from tests.launch.workers import Workers
from towers import options
from towers.devices import Devices

TINY = ("-m", "launch.train", "--model=tiny", "--batch_size=32", "--num_towers=1", "--directory=run")
CPU = "/device:CPU:0"
FLAGS = absl_flags.FLAGS


def chosen(*instructions: str, onednn=True, monkeypatch) -> str:
    """The precision that auto becomes on a CPU with these instructions."""
    monkeypatch.setattr(resolving, "runs_onednn", lambda: onednn)
    devices = Devices(towers=(CPU,), parameters=CPU, cpu_instructions=frozenset(instructions))
    return resolving.chosen_precision(devices)[0]


AMX = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "fast_bfloat16")
ZEN4 = ("avx2", "avx512f", "avx512_bf16", "fast_bfloat16")


@pytest.mark.parametrize(
    "instructions, given, expected",
    [
        (("avx2",), {}, "float32"),
        (("avx2", "avx512f"), {}, "float32"),
        (AMX, {}, "bfloat16"),
        (AMX, {"onednn": False}, "float32"),
        (("avx2", "avx512f", "avx512_bf16"), {}, "float32"),
        (ZEN4, {}, "bfloat16"),
        (ZEN4, {"onednn": False}, "float32"),
        (("bf16",), {}, "float32"),
    ],
)
def test_what_auto_becomes(monkeypatch, instructions, given, expected):
    assert chosen(*instructions, **given, monkeypatch=monkeypatch) == expected


# A ring's worker on a CPU whose instructions alone don't decide the precision. The first worker measures bfloat16
# as slower than float32, the second one as faster.
_UNEQUAL = """
import sys

from launch import train
from launch.flags import precision
from launch.membership.this_process import cluster_of_this_process
from towers import device_setup

device_setup.cpu_instructions = lambda limit: frozenset({"avx2", "avx512f", "avx512_bf16"})
precision.cost_of = lambda precision, **others: (1.01, 0.99)[cluster_of_this_process().index]
train.cli()
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_processes_on_such_cpus_choose_the_same(tmp_path):
    """Their measurements would differ a little, so no worker may decide by its own."""
    (tmp_path / "own.py").write_text(_UNEQUAL)
    flags = ("--strategy=ring", "--engine=own", "--precision=auto", "--steps=2")
    command = ("own.py", *(flag for flag in TINY[2:]), *flags)
    with Workers([command, command], cwd=tmp_path) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    assert [ended.code for ended in ends] == [0, 0], ends[1].err
    assert "precision=auto: float32" in ends[0].err


@pytest.mark.parametrize("capability, expected", [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_gpus(monkeypatch, capability, expected):
    monkeypatch.setattr(resolving, "lowest_compute_capability", lambda: capability)
    devices = Devices(towers=("/device:GPU:0",), parameters=CPU)
    assert resolving.chosen_precision(devices)[0] == expected


@pytest.mark.full
@pytest.mark.timeout(240)
def test_auto_is_resolved_in_all_files_and_a_resumed_run_keeps_its_own(tmp_path):
    done = run_forked(*TINY, "--precision=auto", "--steps=2", cwd=tmp_path)
    assert done.code == 0, done.err
    (note,) = re.findall(r"precision=auto: (\w+)", done.err)
    saved = (tmp_path / "run" / "flags.txt").read_text().splitlines()
    assert f"--precision={note}" in saved
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["flags"]["precision"] == note
    # As if the run had been trained on another CPU.
    other = "bfloat16" if note == "float32" else "float32"
    text = "\n".join(f"--precision={other}" if line.startswith("--precision=") else line for line in saved)
    (tmp_path / "run" / "flags.txt").write_text(text + "\n")
    done = run_forked(*TINY, "--precision=auto", "--steps=3", cwd=tmp_path)
    assert done.code == 0, done.err
    assert f"precision=auto: {other}, as in the resumed run" in done.err


@pytest.mark.parametrize(
    "instructions, flags, expected",
    [
        (("avx2", "avx512f"), {}, [True]),
        (("avx2", "avx512f"), {"tuned_for_cpu": False}, [False]),
        (AMX, {}, []),
        (AMX, {"precision": "float16"}, [True]),
    ],
)
def test_the_cost_is_that_of_the_kernels_that_run(monkeypatch, instructions, flags, expected):
    """`expected`: whether products in float32 are measured, for each measurement."""
    asked = []
    monkeypatch.setattr(
        resolving, "cost_of", lambda precision, *, float32_products: asked.append(float32_products) or 1.0
    )
    for module in (resolving, options):
        monkeypatch.setattr(module, "runs_onednn", lambda: True)
    devices = Devices(towers=(CPU,), parameters=CPU, cpu_instructions=frozenset(instructions))
    if not FLAGS.is_parsed():
        FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**{"precision": "bfloat16"} | flags):
        resolving.resolve_precision(devices, environment={})
    assert asked == expected


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_slow_precision_says_what_it_costs(tmp_path):
    """With TensorFlow's own kernels; with ours float16 costs little."""
    flags = ("--precision=float16", "--notuned_for_cpu", "--steps=1", "--dry_run")
    done = run_forked(*TINY, *flags, cwd=tmp_path)
    (line,) = [line for line in done.err.splitlines() if "times slower" in line]
    assert re.fullmatch(
        r"train: warning: --precision=float16 is about [\d.]+ times slower than float32 on this CPU; "
        r"use --precision=float32",
        line,
    )
