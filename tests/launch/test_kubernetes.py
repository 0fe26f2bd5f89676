"""`python -m launch.kubernetes` writes YAML to stdout or a file, or one line of error to stderr."""

import pytest
import yaml

from launch import kubernetes
from launch.manifests.kinds import KINDS, documents
from tests.launch.manifests.clusters import COMMAND, COMMAND_OF_SERVERS, ring, with_servers
from tests.launch.programs import listing, run_many

FLAGS = ("--name=resnet", "--image=registry.example/towers:1", "--workers=3", "--volume_claim=runs")
REFUSED = {
    "no name": (["--image=x", "--workers=1", "--", *COMMAND], "--name"),
    "an unknown kind": ([*FLAGS, "--kind=pod", "--", *COMMAND], "job|jobset|tfjob"),
    "no command": ([*FLAGS], "add it after --"),
    "a command without --": ([*FLAGS, "python"], "put -- before the command"),
    "a command without a directory": ([*FLAGS, "--", "python"], "no --directory"),
    "a name too long": ([*FLAGS, f"--name={'n' * 62}", "--", *COMMAND], "at most 61 letters"),
    "a file that can't be written": ([*FLAGS, "--output=/proc/a.yaml", "--", *COMMAND], "--output=/proc/a.yaml"),
}
WRITTEN = {kind: [*FLAGS, f"--kind={kind}", "--", *COMMAND] for kind in KINDS}
WRITTEN["with servers"] = [*FLAGS, "--ps=2", "--", *COMMAND_OF_SERVERS]
WRITTEN["to a file"] = [*FLAGS, "--output=ring.yaml", "--", *COMMAND]
WRITTEN["without a volume"] = [*FLAGS[:3], "--namespace=ml", "--", *COMMAND]


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    calls = {name: flags for name, (flags, _) in REFUSED.items()} | WRITTEN
    folder = tmp_path_factory.mktemp("kubernetes")
    found = run_many([("launch.kubernetes", flags) for flags in calls.values()], folder)
    return dict(zip(calls, found, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_line(name, endings):
    ended, cwd = endings[name]
    assert (ended.code, ended.out, listing(cwd)) == (2, "", [])
    assert ended.err.startswith("kubernetes: error: ")
    assert ended.err.count("\n") == 1
    assert REFUSED[name][1] in ended.err


@pytest.mark.parametrize("kind", KINDS)
def test_stdout_contains_the_documents(kind, endings):
    ended, cwd = endings[kind]
    assert (ended.code, ended.err, listing(cwd)) == (0, "", [])
    secret, *written = yaml.safe_load_all(ended.out)
    assert secret["kind"] == "Secret"
    assert written == documents(kind, ring())[1:]


def test_servers(endings):
    ended, _ = endings["with servers"]
    assert (ended.code, ended.err) == (0, "")
    _, *written = yaml.safe_load_all(ended.out)
    assert written == documents("job", with_servers())[1:]
    assert ended.out.startswith("# A chief, 2 parameter servers and 3 workers as job, written by")
    assert "--max-log-requests=6" in ended.out


def test_a_file_is_written(endings):
    ended, cwd = endings["to a file"]
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    path = cwd / "ring.yaml"
    written = list(yaml.safe_load_all(path.read_text()))
    assert written[1:] == list(yaml.safe_load_all(endings["job"][0].out))[1:]
    # The file holds a secret, drawn for this file.
    assert path.stat().st_mode & 0o777 == 0o600
    assert written[0]["stringData"] != next(yaml.safe_load_all(endings["job"][0].out))["stringData"]


def test_a_file_that_others_could_read(tmp_path):
    """Others can't read the new secret."""
    path = tmp_path / "ring.yaml"
    path.touch(mode=0o644)
    kubernetes.write("text", str(path))
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, "text")


def test_a_missing_volume_is_reported(endings):
    ended, _ = endings["without a volume"]
    assert ended.code == 0
    assert ended.err == (
        "kubernetes: note: --directory=/data/run is inside the pods and is lost when they restart; "
        "mount a volume with --volume_claim\n"
    )
    assert "# NO VOLUME" in ended.out
    assert "NO VOLUME" not in endings["job"][0].out


@pytest.mark.parametrize("kind", KINDS)
def test_the_comment_has_the_commands_and_the_warnings(kind):
    described = {"namespace": "ml", "max_restarts": 7}
    for pods in (with_servers(workers=6, **described), ring(workers=9, **described)):
        check_comment(" ".join(kubernetes.comment(kind, pods).split()))


def check_comment(text):
    assert "kubectl apply -f FILE" in text
    assert "kubectl -n ml logs -f --prefix --max-log-requests=9" in text
    assert "no authentication" in text
    assert "ReadWriteMany" in text
    assert "at most 7 times" in text
    assert "{" not in text
