"""A user's mistake: one line with the value, the rule and the fix, exit code 2, no file written."""

import shutil

import pytest

from tests.launch.nursery import run_forked
from tests.launch.programs import LAST_STEP, TINY, listing
from tests.tiers import first_quick

pytestmark = pytest.mark.timeout(300)

# Flags in addition to TINY, and what the line must contain.
CASES = {
    "more towers than examples": (
        ["--batch_size=3", "--num_towers=4"],
        ("3", "4 towers"),
    ),
    "more towers than examples of a microbatch": (
        ["--batch_size=8", "--num_towers=3", "--accumulation=4"],
        ("accumulation=4", "3"),
    ),
    "a share without a tower": (["--tower_shares=3,1,1"], ("tower_shares", "3", "2")),
    "a share that is no number": (
        ["--tower_shares=3,much"],
        ("--tower_shares=3,much", "by commas, as 3,1"),
    ),
    "a share of nothing": (["--tower_shares=1,0"], ("tower_shares", "0")),
    "an unknown parameter device": (
        ["--parameter_device=tpu"],
        ("--parameter_device=tpu is", "auto, cpu, cpu:K, gpu:K, sharded or replicated"),
    ),
    "a parameter device that is not here": (
        ["--parameter_device=cpu:7"],
        ("--parameter_device=cpu:7 does", "cpu:0, cpu:1"),
    ),
    "parameters on a GPU where there is none": (
        ["--parameter_device=gpu"],
        ("--parameter_device=gpu does", "cpu:0"),
    ),
    "towers on a GPU where there is none": (["--tower_device=gpu"], ("'gpu'", "no GPU", "use cpu")),
    "an unknown tower device": (["--tower_device=tpu"], ("tower_device", "tpu", "auto")),
    "an unknown model": (["--model=resnet21"], ("resnet21", "resnet20")),
    "an unknown task": (["--task=shape"], ("--task=shape:", "did you mean 'shapes'")),
    "parameter servers alone": (
        ["--strategy=ps"],
        (
            "--strategy=ps needs several processes",
            "python -m launch.local --chief --workers=2 --ps=1 -- python -m",
        ),
    ),
    "several steps of a deterministic graph": (
        ["--steps_per_execution=4", "--deterministic"],
        ("--steps_per_execution=4 with --deterministic", "omit one of them"),
    ),
    "several steps of a mode without them": (
        ["--steps_per_execution=4", "--strategy=mirrored"],
        ("--steps_per_execution=4 with --strategy=mirrored", "--strategy=towers"),
    ),
    "an unknown strategy": (["--strategy=mirored"], ("--strategy=mirored is unknown", "did you mean mirrored?")),
    "an unknown optimizer": (["--optimizer=sdg"], ("optimizer", "sdg", "sgd")),
    "no examples in a batch": (["--batch_size=0"], ("--batch_size=0", "above 0")),
    "fewer than no steps": (["--steps=-5"], ("--steps=-5", "above 0")),
    "steps that are no number": (["--steps=many"], ("--steps=many", "invalid")),
    "an evaluation after infinitely many epochs": (
        ["--evaluate_every_epochs=inf"],
        ("--evaluate_every_epochs=inf", "give a finite number"),
    ),
    "more threads than any machine runs": (
        ["--threads_per_tower=100000"],
        ("--threads_per_tower=100000", "at most 4096"),
    ),
    "an unknown flag": (["--learning_rat=0.1"], ("learning_rat", "learning_rate")),
    "an argument that is no flag": (["train"], ("'train'", "--help")),
    "steps and epochs": (["--epochs=2"], (f"--steps={LAST_STEP}", "--epochs=2", "only one of them")),
    "cifar10 without its folder": (["--task=cifar10"], ("cifar10", "data_dir")),
    "cifar10 where it is not": (["--task=cifar10", "--data_dir=nowhere"], ("cifar10", "nowhere", "import_cifar")),
    "a checkpoint that is not there": (["--resume=old/step-5"], ("resume=old/step-5", "no such checkpoint")),
    "a rate below nothing": (["--learning_rate=-1"], ("--learning_rate=-1", "0 or more")),
    "a rate that is no number": (["--learning_rate=nan"], ("--learning_rate=nan", "0 or more")),
    "a momentum of 1": (["--momentum=1"], ("momentum=1.0", "[0, 1)")),
    "a momentum of 1 for muon": (["--optimizer=muon", "--momentum=1"], ("momentum=1.0", "[0, 1)")),
    "a smoothing of 1": (["--label_smoothing=1"], ("label_smoothing=1.0", "below 1")),
    "a boundary that is no number": (
        ["--schedule=piecewise", "--boundaries=x"],
        ("--boundaries=x", "steps separated by commas"),
    ),
    "no boundary": (["--schedule=piecewise"], ("--schedule=piecewise without", "as --boundaries=1000,2000")),
    "a seed that is too large": (["--seed=99999999999"], ("seed=99999999999",)),
    "a profile of nonsense": (["--profile_steps=5"], ("--profile_steps=5", "FIRST:LAST")),
    "a profile of steps backwards": (["--profile_steps=9:5"], ("profile_steps=9:5", "FIRST < LAST")),
    "a timeline of servers": (
        ["--timeline_steps=1:2", "--strategy=ps"],
        ("--timeline_steps=1:2 with --strategy=ps", "use another strategy"),
    ),
    "a timeline of a profile": (
        ["--timeline_steps=1:2", "--profile_steps=1:2"],
        ("--timeline_steps=1:2 and --profile_steps=1:2", "give only one"),
    ),
    "no checkpoint to keep": (["--keep_checkpoints=0"], ("--keep_checkpoints=0", "above 0")),
    "a network of images for clicks": (["--task=clicks"], ("--model=tiny", "trains only 'dlrm'")),
    "dlrm for images": (["--model=dlrm"], ("--model=dlrm", "--task=shapes has images")),
    "a network of images for text": (["--task=text"], ("--model=tiny", "trains only 'transformer'")),
    "a vocabulary without a choice": (["--task=text", "--text_tokens=3"], ("--text_tokens=3", "4 or more")),
    "a table without rows": (["--task=clicks", "--click_rows=0"], ("--click_rows=0", "above 0")),
    "a directory under a file": (["--directory=/dev/null/run"], ("/dev/null/run", "can be written")),
    "a directory that cannot be": (["--directory=/proc/run"], ("/proc/run", "can be written")),
    "xla with synced statistics": (["--xla", "--batch_stats=synced"], ("--xla with", "use --batch_stats=average")),
    "a profile outside of the run": (
        ["--profile_steps=70:80"],
        ("profile_steps=70:80", f"steps 0 to {LAST_STEP - 1}"),
    ),
    "a profile of a dry run": (["--profile_steps=0:2", "--dry_run"], ("profile_steps=0:2", "dry run")),
}
NUM_QUICK = 8
# Detected after the run's directory was created; the run can be resumed from there.
CREATES_DIRECTORY = ("a profile outside of the run",)


@pytest.fixture(scope="module")
def refusals(request, tmp_path_factory):
    """For each case of this run: how it ended, and the files that it left in its folder."""
    names = list(CASES) if request.config.getoption("--full") else list(CASES)[:NUM_QUICK]
    found = {}
    for name in names:
        cwd = tmp_path_factory.mktemp("refusal")
        ended = run_forked("-m", "launch.train", *TINY, "--directory=run", *CASES[name][0], cwd=cwd)
        found[name] = (ended, listing(cwd))
    return found


def assert_refused(ended, parts, program="train"):
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith(f"{program}: error: ")
    for part in parts:
        assert part in lines[0], f"{part!r} is not in: {lines[0]}"
    assert ended.code == 2


@pytest.mark.parametrize("name", first_quick(CASES, NUM_QUICK))
def test_one_line_and_nothing_written(name, refusals):
    ended, left = refusals[name]
    assert_refused(ended, CASES[name][1])
    assert left == [] or name in CREATES_DIRECTORY


@pytest.mark.full
def test_another_model_in_the_directory(finished_run, tmp_path):
    """A checkpoint of another model or optimizer is refused and not changed."""
    shutil.copytree(finished_run.directory, tmp_path / "run")
    before = listing(tmp_path)
    command = ("-m", "launch.train", *TINY, "--directory=run")
    model, optimizer = (
        run_forked(*command, flag, cwd=tmp_path) for flag in ("--model=alexnet", "--optimizer=adam")
    )
    assert_refused(model, ("parameters/conv1/kernel", "of shape [5, 5, 3, 64]", "use the same model"))
    assert_refused(optimizer, ("slots/", "use the same optimizer"))
    assert listing(tmp_path) == before
