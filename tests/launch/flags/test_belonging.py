"""A flag that has no effect with the others is refused; defaults and the values of a recipe are not."""

import pytest

from tests.launch.nursery import run_forked
from tests.launch.programs import TINY, errors

REFUSED = {
    "strategy": (
        ["--strategy=mirrored", "--staleness=2"],
        "--staleness=2 with --strategy=mirrored",
        "=ps; use that",
    ),
    "a time": (
        ["--strategy=ring", "--worker_timeout_seconds=9"],
        "--worker_timeout_seconds=9.0 with",
        "=ps; use that",
    ),
    "a truth": (["--staleness_aware"], "--staleness_aware with --strategy=towers", "=ps; use that, or omit"),
    "of two": (["--engine=own"], "--engine=own with --strategy=towers", "=ring or ps; use one of these"),
    "list": (["--worker_shares=2,1"], "--worker_shares=2,1 with --strategy=towers", "=ring; use that"),
    "optimizer": (["--optimizer=adam", "--momentum=0.5"], "--momentum=0.5 with", "=momentum, nesterov or muon"),
    "of the default": (["--adam_beta_1=0.5"], "--adam_beta_1=0.5 with --optimizer=nesterov", "=adam or adamw"),
    "schedule": (["--boundaries=1,2"], "--boundaries=1,2 with --schedule=one_cycle", "=piecewise; use that"),
    "task": (["--text_length=8"], "--text_length=8 with --task=shapes", "=text; use that, or omit --text_length"),
    "images": (["--task=text", "--flip=alternating"], "--flip=alternating with", "=shapes, cifar10 or tfds:NAME"),
    "folder": (["--data_dir=a"], "--data_dir=a with --task=shapes", "=cifar10 or tfds:NAME; use one of these"),
    "memory": (["--task=text", "--cache_gib=1"], "--cache_gib=1.0 with --task=text", "=cifar10 or tfds:NAME"),
    "no crops": (
        ["--crop_padding=2"],
        "--crop_padding=2 with --task=shapes: training images",
        "use --augment, or",
    ),
    "no mirrors": (
        ["--noaugment", "--flip=alternating"],
        "--flip=alternating with --noaugment: training images are not augmented",
        "use --augment, or omit --flip",
    ),
    "no decay": (
        ["--weight_decay=0", "--decay_all"],
        "--decay_all with --weight_decay=0: no weight decays",
        "give for example --weight_decay=0.005, or omit --decay_all",
    ),
    "no decay by default": (["--optimizer=sgd", "--decay_all"], "--decay_all with --optimizer=sgd: no weight", ""),
    "no device of parameters": (
        ["--strategy=mirrored", "--parameter_device=cpu:1"],
        "--parameter_device=cpu:1 with --strategy=mirrored: each tower's device has a copy of all parameters",
        "use --strategy=towers, or omit --parameter_device",
    ),
    "no device of a pipeline's parameters": (
        ["--strategy=pipeline", "--num_towers=1", "--parameter_device=cpu"],
        "--parameter_device=cpu with --strategy=pipeline: each device of a tower",
        "or omit --parameter_device",
    ),
    "no device of a ring's slices": (
        ["--strategy=ring", "--grid=slice:2", "--parameter_device=cpu:1"],
        "--parameter_device=cpu:1 with --strategy=ring: each device of a tower",
        "or omit --parameter_device",
    ),
    "no verification": (["--verify_tolerance=0.1"], "--verify_tolerance=0.1 without --verify", "use --verify, or"),
    "sets": (["--image_size=8"], "--image_size=8 with --task=shapes", "=cifar10 or tfds:NAME; use one of these"),
}
TAKEN = {
    "defaults, what augments, a device of parameters": [
        *("--staleness=async", "--momentum=0.9", "--text_length=64", "--optimizer=adam"),
        *("--augment", "--flip=alternating", "--crop_padding=2", "--crop_fill=reflect"),
        "--parameter_device=cpu:1",
    ],
    "what decays": ["--optimizer=sgd", "--weight_decay=0.001", "--decay_all"],
    "a recipe's value": [
        "--recipe=cifar_fast",
        "--optimizer=adam",
        "--task=shapes",
        "--weight_decay=0",
        "--steps=2",
    ],
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """How each call ended, by name."""
    calls = {name: flags for name, (flags, *_) in REFUSED.items()} | TAKEN
    command, folder = ("-m", "launch.train", *TINY, "--dry_run"), tmp_path_factory.mktemp("belonging")
    return {name: run_forked(*command, *flags, cwd=folder) for name, flags in calls.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_names_flag_and_owner(ends, name):
    _, flag, owner = REFUSED[name]
    (line,) = errors(ends[name])
    assert ends[name].code == 2
    assert line.startswith(f"train: error: {flag}")
    assert owner in line


@pytest.mark.parametrize("name", TAKEN)
def test_what_does_no_harm_passes(ends, name):
    assert (ends[name].code, errors(ends[name])) == (0, [])


READING = [
    ("--text_examples=200", "has no checkpoint yet"),
    ("--image_size=64", "--image_size=64 with --task=text: it belongs to --task=cifar10"),
    ("--learning_rate=0.1", "--learning_rate=0.1 has no effect, because this program does not train: omit it"),
    ("--steps=8", "--steps=8 has no effect"),
    ("--recipe=cifar_fast", "--recipe=cifar_fast has no effect"),
    # As in the run: one set of flags may be for several programs.
    ("--steps=9", "has no checkpoint yet"),
    ("--verify", "--verify reads no checkpoint"),
]
# Of the programs that look for a checkpoint, one is quick: they build a model first.
OF_PROGRAMS = [
    *[("evaluate", *case) for case in READING],
    *[
        pytest.param("export", *case, marks=pytest.mark.full if "no checkpoint yet" in case[1] else ())
        for case in READING
    ],
]


@pytest.mark.parametrize("program, flag, said", OF_PROGRAMS)
def test_what_reads_a_run_asks_the_task_of_the_run(tmp_path, program, flag, said):
    (tmp_path / "flags.txt").write_text("--task=text\n--model=transformer_tiny\n--batch_size=8\n--steps=9\n")
    done = run_forked("-m", f"launch.{program}", "--directory=.", flag, cwd=tmp_path)
    (line,) = errors(done)
    assert done.code == 2
    assert said in line
