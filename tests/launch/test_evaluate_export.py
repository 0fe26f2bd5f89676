"""`launch.evaluate` and `launch.export` on a run's directory."""

import json
import pathlib
import shutil

import pytest

from tests.launch.nursery import run_forked
from tests.launch.programs import LAST_STEP, TINY, errors, listing, run
from tests.launch.server_groups import ServerGroup
from tests.launch.server_runs import all_end

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

EVALUATE, EXPORT = "launch.evaluate", "launch.export"


@pytest.fixture(scope="module")
def copied(finished_run, tmp_path_factory):
    """A copy of the run, which tests may export to."""
    return shutil.copytree(finished_run.directory, tmp_path_factory.mktemp("copied") / "run")


@pytest.fixture(scope="module")
def damaged(finished_run, tmp_path_factory):
    """A copy of the run whose newest checkpoint is truncated."""
    directory = shutil.copytree(finished_run.directory, tmp_path_factory.mktemp("damaged") / "run")
    data = directory / "checkpoints" / f"step-{LAST_STEP}.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    return directory


CLUSTERS = {
    "of servers": ("--strategy=ps", "--engine=tensorflow"),
    "of our own servers": ("--strategy=ps", "--engine=own", "--staleness=sync", "--backup_workers=1"),
    "of a ring": ("--strategy=ring", "--worker_shares=2,1"),
}


@pytest.fixture(scope="module")
def of_clusters(copied, tmp_path_factory):
    """Directories of runs that several processes trained, by name. All modes write the same checkpoints."""
    found = {}
    for name, flags in CLUSTERS.items():
        found[name] = shutil.copytree(copied, tmp_path_factory.mktemp("cluster") / "run")
        with (found[name] / "flags.txt").open("a") as file:
            file.writelines(f"{flag}\n" for flag in flags)
    return found


@pytest.fixture(scope="module")
def runs(copied, damaged, of_clusters, tmp_path_factory):
    """How each call ended, by the call's name."""
    folder = tmp_path_factory.mktemp("evaluations")
    without = folder / "without"
    without.mkdir()
    (without / "flags.txt").write_text((copied / "flags.txt").read_text())
    calls = {
        "plain": (EVALUATE, [f"--directory={copied}"]),
        "json": (EVALUATE, [f"--directory={copied}", "--json"]),
        "other batches": (
            EVALUATE,
            [f"--directory={copied}", "--json", "--eval_batch_size=300", "--num_towers=1"],
        ),
        "an earlier one": (
            EVALUATE,
            [f"--directory={copied}", "--json", f"--resume={copied}/checkpoints/step-{LAST_STEP - 5}"],
        ),
        "damaged": (EVALUATE, [f"--directory={damaged}", "--json"]),
        **{name: (EVALUATE, [f"--directory={path}", "--json"]) for name, path in of_clusters.items()},
        "by servers": (EVALUATE, [f"--directory={of_clusters['of servers']}", "--strategy=ps"]),
        "no flag": (EVALUATE, []),
        "no run": (EVALUATE, ["--directory=elsewhere"]),
        "no checkpoint": (EVALUATE, [f"--directory={without}"]),
        "export of no flag": (EXPORT, []),
        "export of no run": (EXPORT, ["--directory=elsewhere"]),
        "export of no checkpoint": (EXPORT, [f"--directory={without}"]),
        "export by another suffix": (EXPORT, [f"--directory={copied}", "--output=model.h5"]),
    }
    before = listing(copied)
    ended = {}
    for name, (module, flags) in calls.items():
        cwd = tmp_path_factory.mktemp("call")
        ended[name] = (run_forked("-m", module, *flags, cwd=cwd), cwd)
    assert listing(copied) == before, "an evaluation writes nothing"
    return ended


def summary_of(directory):
    return json.loads((directory / "summary.json").read_text())


_NOT_FINITE = """
import types
from launch import evaluate

strategy = types.SimpleNamespace(step=3, keeps_files=True)
found = {"loss": float("nan"), "accuracy": 0.5}
evaluate.load_run = lambda: None
evaluate.restored_trainer = lambda: types.SimpleNamespace(strategy=strategy, evaluate=lambda: found)
evaluate.cli()
"""


def test_json_of_numbers_that_are_not_finite_is_json(tmp_path):
    (tmp_path / "program.py").write_text(_NOT_FINITE)
    done = run_forked("program.py", "--json", cwd=tmp_path)
    assert json.loads(done.out, parse_constant=pytest.fail) == {"step": 3, "loss": None, "accuracy": 0.5}


@pytest.mark.full
def test_json_holds_the_numbers_of_the_summary(runs, copied):
    ended, _ = runs["json"]
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert json.loads(ended.out) == {"step": LAST_STEP, **summary_of(copied)["evaluation"]}


@pytest.mark.full
def test_printed_text(runs, copied):
    ended, _ = runs["plain"]
    expected = summary_of(copied)["evaluation"]
    assert ended.out == (
        f"evaluation of step {LAST_STEP}: loss {expected['loss']:.4f}, accuracy {expected['accuracy']:.4f}\n"
    )


@pytest.mark.full
def test_flags_of_the_command_line_override_the_run_s(runs, copied):
    found = json.loads(runs["other batches"][0].out)
    expected = summary_of(copied)["evaluation"]
    assert found["accuracy"] == expected["accuracy"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def of_slices(tmp_path_factory):
    """Directory of a run whose tower's layers are divided over two devices."""
    folder = tmp_path_factory.mktemp("slices")
    tiny = [flag for flag in TINY if not flag.startswith(("--num_towers", "--steps"))]
    flags = ("--strategy=slices", "--grid=slice:2", "--steps=10", "--directory=run")
    done = run_forked("-m", "launch.train", *tiny, *flags, cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--strategy=towers", "--num_towers=1"),
        ("--slices=3",),
        ("--grid=data:2,slice:2",),
        ("--num_towers=2",),
        ("--layout=*=whole",),
        ("--strategy=pipeline", "--stages=2"),
    ],
)
def test_a_run_of_slices_is_evaluated_on_other_devices(of_slices, tmp_path, flags):
    done = run_forked("-m", EVALUATE, f"--directory={of_slices}", "--json", *flags, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    found, expected = json.loads(done.out), summary_of(of_slices)["evaluation"]
    assert found == {"step": 10, **expected, "loss": pytest.approx(expected["loss"], rel=1e-6)}


@pytest.mark.full
def test_a_run_of_uneven_towers_is_evaluated_on_one(copied, tmp_path):
    """The run's --tower_shares would be one too many, and no value switches them off."""
    directory = shutil.copytree(copied, tmp_path / "run")
    with (directory / "flags.txt").open("a") as file:
        file.write("--tower_shares=3,1\n")
    done = run_forked("-m", EVALUATE, "--directory=run", "--json", "--num_towers=1", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["accuracy"] == summary_of(copied)["evaluation"]["accuracy"]


@pytest.mark.full
def test_a_precision_is_measured_on_the_devices_of_the_run(copied, tmp_path):
    """Measuring starts TensorFlow, whose devices are final then; this run has more than are there by default."""
    directory = shutil.copytree(copied, tmp_path / "run")
    text = (directory / "flags.txt").read_text()
    (directory / "flags.txt").write_text(text.replace("--num_towers=2", "--num_towers=5"))
    done = run_forked("-m", EVALUATE, "--directory=run", "--precision=float16", cwd=tmp_path)
    assert (done.code, errors(done)) == (0, [])


@pytest.mark.full
def test_an_earlier_checkpoint(runs, copied):
    found = json.loads(runs["an earlier one"][0].out)
    assert found["step"] == LAST_STEP - 5
    assert found["loss"] != summary_of(copied)["evaluation"]["loss"]


@pytest.mark.full
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_run_of_several_processes_is_evaluated_by_one(runs, copied, name):
    ended, _ = runs[name]
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert json.loads(ended.out) == {"step": LAST_STEP, **summary_of(copied)["evaluation"]}


@pytest.mark.full
def test_a_damaged_checkpoint_is_reported(runs, damaged):
    ended, _ = runs["damaged"]
    assert json.loads(ended.out)["step"] == LAST_STEP - 5
    assert f"{damaged}/checkpoints/step-{LAST_STEP} can't be read" in ended.err
    assert "trying the one before it" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "name, parts",
    [
        ("by servers", ("evaluate: error: ", "--strategy=ps", "no parameter servers", "omit --strategy")),
        ("no flag", ("evaluate: error: --directory is missing",)),
        ("no run", ("evaluate: error: --directory=elsewhere", "holds no run")),
        ("no checkpoint", ("evaluate: error: --directory=", "no checkpoint yet", "train first")),
        ("export of no flag", ("export: error: --directory is missing",)),
        ("export of no run", ("export: error: --directory=elsewhere", "holds no run")),
        ("export of no checkpoint", ("export: error: --directory=", "no checkpoint yet")),
        ("export by another suffix", ("export: error: ", "model.h5", "ends in .keras", "model.keras")),
    ],
)
def test_errors(runs, name, parts):
    ended, cwd = runs[name]
    assert ended.code == 2
    [line] = ended.err.splitlines()
    for part in parts:
        assert part in line
    assert ended.out == ""
    assert listing(cwd) == []


def test_export(copied, tmp_path):
    done = run("-m", EXPORT, f"--directory={copied}", "--output=exported/model.keras", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.err == ""
    first, second = done.out.splitlines()
    path = tmp_path / "exported" / "model.keras"
    assert first == f"exported step {LAST_STEP} to {path}"
    assert second.startswith("checked in a fresh process: outputs agree to ")
    assert float(second.split()[-1]) <= 1e-6
    assert listing(tmp_path) == ["exported", "exported/model.keras"]
    assert weights_of(path) == weights_of(pathlib.Path(copied) / "model.keras")


@pytest.mark.full
@pytest.mark.parametrize("engine", ["tensorflow", "own"])
def test_a_run_that_servers_trained_is_exported_by_one_process(tmp_path, engine):
    flags = ("--strategy=ps", f"--engine={engine}", "--steps=10", "--learning_rate=0.001", "--directory=run")
    command = ("-m", "launch.train", *(flag for flag in TINY if "steps=" not in flag), *flags)
    with ServerGroup(command, workers=1, servers=2, cwd=tmp_path) as group:
        all_end(group)
    done = run_forked("-m", EXPORT, "--directory=run", "--output=model.keras", cwd=tmp_path)
    assert (done.code, done.err) == (0, ""), done.err
    assert done.out.startswith("exported step 10 to ")
    assert weights_of(tmp_path / "model.keras") == weights_of(tmp_path / "run" / "model.keras")


@pytest.mark.full
def test_the_check_sees_a_damaged_row_of_an_embedding(tmp_path):
    ended = run_forked("-m", "tests.launch.export_check_program", cwd=tmp_path)
    assert "damaged.keras: outputs differ by " in ended.err, ended.out + ended.err


@pytest.mark.full
def test_a_check_that_takes_too_long_ends_in_one_line(tmp_path):
    ended = run_forked("-m", "tests.launch.export_check_program", "0.01", cwd=tmp_path)
    assert ended.code == 2, ended.out + ended.err
    (line,) = [line for line in ended.err.splitlines() if "error: " in line]
    assert "damaged.keras is written but not checked" in line and "within 0.01 seconds" in line
    assert "Traceback" not in ended.err


def weights_of(path):
    import keras

    return [array.tobytes() for array in keras.saving.load_model(path).get_weights()]
