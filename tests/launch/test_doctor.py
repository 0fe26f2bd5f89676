"""`python -m launch.doctor` as a user runs it: the report, the exit code, and no credential in the report."""

import json
import pathlib

import pytest

from launch import doctor
from launch.health.section import Section
from tests.launch.health.sockets import closed, listening
from tests.launch.programs import run

TITLES = ["versions", "devices", "threads", "cluster", "disk", "data", "environment"]
SECRET = "Sekrit"

# A credential in everything that the report may show; the number after it identifies the text.
LEAKY = {
    "NCCL_API_KEY": SECRET + "1",
    "XLA_FLAGS": f"--xla_token={SECRET}2",
    "KERAS_HOME": f"https://user:{SECRET}3@host/keras",
    "SLURM_SUBMIT_URL": f"https://host/?X-Amz-Signature={SECRET}4",
    "TF_CONFIG": json.dumps({"cluster": {"worker": [f"user:{SECRET}5@host"]}, "task": {}}),
    "CUDA_HEADER": f"Bearer {SECRET}6",
    "DB_PASSWORD": SECRET + "7in-another",
    "TF_NAMED": f"prefix{SECRET}7in-another",
    "OMP_NUM_THREADS": f"secret={SECRET}8",
}
LEAKY_FLAGS = (f"--directory=gs://u:{SECRET}9@bucket/run", f"--data_dir=https://host/data?sig={SECRET}10")


def report(cwd, *flags, **environment):
    """Runs the doctor with these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CONFIG", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        return run("-m", "launch.doctor", *flags, cwd=cwd)


def problems(text):
    """The problems listed at the end of the report."""
    head, _, lines = text.partition("\nproblems:\n")
    assert lines, f"no problem is listed: {head[-500:]}"
    return [line.removeprefix("  ") for line in lines.splitlines()]


@pytest.mark.full
def test_no_problem(tmp_path):
    """A worker whose peer answers; the report is JSON."""
    with listening() as port:
        cluster = {"worker": [f"127.0.0.1:{closed()}", f"127.0.0.1:{port}"]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        ended = report(tmp_path, "--json", f"--directory={tmp_path}", TF_CONFIG=config)
    found = json.loads(ended.out)
    assert found["problems"] == []
    assert (ended.code, ended.err) == (0, "")
    assert list(found["facts"]) == TITLES, "without --selftest there is none"
    assert ", reached in " in found["facts"]["cluster"]["worker:1"]
    assert found["facts"]["environment"]["TF_CONFIG"] == config
    assert list(tmp_path.iterdir()) == [], "the doctor must write no file"


@pytest.mark.full
def test_each_problem_is_one_line(tmp_path):
    """A peer that does not listen, a directory that can't be written and no data; exit code 2."""
    peer = f"127.0.0.1:{closed()}"
    config = {"cluster": {"worker": [f"127.0.0.1:{closed()}", peer]}, "task": {"type": "worker", "index": 0}}
    ended = report(tmp_path, "--directory=/proc/run", "--data_dir=none", TF_CONFIG=json.dumps(config))
    assert (ended.code, ended.err) == (2, "")
    lines = problems(ended.out)
    assert [line.split(" ")[0] for line in lines] == ["worker:1", "--directory=/proc/run:", "--data_dir=none:"]
    assert [line for line in ended.out.splitlines() if line in TITLES] == TITLES
    assert lines[0].startswith(f"worker:1 at {peer}, refused")


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaky")
    return {
        "text": report(folder, *LEAKY_FLAGS, **LEAKY),
        "json": report(folder, *LEAKY_FLAGS, "--json", **LEAKY),
    }


@pytest.mark.full
@pytest.mark.parametrize("how", ["text", "json"])
def test_no_credential_is_shown(leaky, how):
    ended = leaky[how]
    assert ended.code == 2
    assert SECRET not in ended.out + ended.err
    for name in ("NCCL_API_KEY", "XLA_FLAGS", "KERAS_HOME", "TF_CONFIG", "TF_NAMED", "CUDA_HEADER"):
        assert name in ended.out, "the report must show the variable's name"
    assert "DB_PASSWORD" not in ended.out
    assert "hidden" in ended.out


@pytest.mark.full
def test_a_problem_with_a_hidden_text_is_still_listed(leaky):
    """LEAKY's TF_CONFIG is invalid, and its --data_dir contains no dataset."""
    found = json.loads(leaky["json"].out)
    titles = {line.partition(":")[0] for line in found["problems"]}
    assert {"cluster", "data"} <= titles
    assert found["facts"]["disk"]["directory"] == "hidden"


@pytest.mark.parametrize(
    "text",
    [
        "worker",
        "[]",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "one"}}',
    ],
)
def test_an_invalid_tf_config_is_a_problem(text):
    found = doctor.cluster_check({"TF_CONFIG": text}, timeout_seconds=0.1)
    (problem,) = found.problems
    assert problem.startswith("TF_CONFIG")
    assert "\n" not in problem
    assert found.facts == {"cluster": "invalid"}


@pytest.mark.parametrize("variables", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}], ids=str)
def test_without_tf_config_there_is_no_cluster(variables):
    found = doctor.cluster_check(variables, timeout_seconds=0.1)
    assert found.problems == ()
    assert "not set" in found.facts["TF_CONFIG"]


def test_a_check_that_raises_becomes_a_problem():
    def check():
        raise RuntimeError("no such thing")

    assert doctor.section_of("disk", lambda: Section(facts={"a": "b"})).facts == {"a": "b"}
    (problem,) = doctor.section_of("disk", check).problems
    assert problem == "disk: this check failed with RuntimeError: no such thing; report this line as a bug"


@pytest.mark.full
def test_a_timeout_of_zero_is_refused(tmp_path):
    ended = report(tmp_path, "--timeout_seconds=0")
    assert (ended.code, ended.out) == (2, "")
    assert "--timeout_seconds=0" in ended.err


def test_the_console_script_is_declared():
    setup = (pathlib.Path(doctor.__file__).parent.parent / "setup.cfg").read_text()
    assert "towers-doctor = launch.doctor:cli" in setup


@pytest.mark.full
def test_a_terminal_that_lacks_a_character_of_a_path(tmp_path):
    done = report(tmp_path, f"--directory={tmp_path}/é", PYTHONIOENCODING="ascii")
    assert done.code == 0, done.err
    assert "\\xe9, will be created" in done.out
