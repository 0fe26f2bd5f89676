"""Invalid values are refused in one line, before anything is written."""

import pytest

from tests.launch.manifests.clusters import COMMAND, COMMAND_OF_SERVERS, ring
from towers.errors import UserError

REFUSED = {
    "a name in capitals": ({"name": "ResNet"}, ("--name=ResNet", "lower-case letters", "resnet-run")),
    "a name with a line break": ({"name": "a\nb"}, ("--name=a",)),
    "a name that begins with a digit": ({"name": "9lives"}, ("--name=9lives", "begins with a letter")),
    "a name that ends with a dash": ({"name": "a-"}, ("--name=a-",)),
    "a name with a dot": ({"name": "a.b"}, ("--name=a.b",)),
    "no name": ({"name": ""}, ("--name=:",)),
    "a name of 64 letters": ({"name": "n" * 64}, ("at most 63",)),
    "a namespace in capitals": ({"namespace": "ML"}, ("--namespace=ML", "kubectl get namespaces")),
    "an image with a space": ({"image": "a b"}, ("--image=a b", "registry.example")),
    "no image": ({"image": ""}, ("--image=:",)),
    "a claim in capitals": ({"volume_claim": "Runs"}, ("--volume_claim=Runs", "kubectl get pvc")),
    "no worker": ({"workers": 0}, ("--workers=0", "from 1 to 1000")),
    "too many workers": ({"workers": 1001}, ("--workers=1001", "from 1 to 1000")),
    "servers of a ring": ({"ps": 1}, ("--ps=1", "--strategy=ring", "omit --ps", "use --strategy=ps")),
    "no servers": ({"ps": 0, "command": COMMAND_OF_SERVERS}, ("--ps=0", "--strategy=ps", "omit --ps")),
    "a negative number of servers": ({"ps": -1}, ("--ps=-1", "out of range")),
    "too many servers": ({"ps": 1001, "command": COMMAND_OF_SERVERS}, ("--ps=1001", "to 1000")),
    "a negative number of GPUs": ({"gpus_per_worker": -1}, ("--gpus_per_worker=-1", "from 0 to 64")),
    "a negative number of restarts": ({"max_restarts": -1}, ("--max_restarts=-1", "from 0 to 1000")),
    "port 0": ({"port": 0}, ("--port=0", "from 1 to 65535")),
    "a port too high": ({"port": 65536}, ("--port=65536", "from 1 to 65535")),
    "no cores": ({"cpus": "0"}, ("--cpus=0", "above 0")),
    "cores in words": ({"cpus": "four"}, ("--cpus=four", "500m")),
    "memory without a unit": ({"memory": "8"}, ("--memory=8", "8Gi")),
    "memory in thousandths of bytes": ({"memory": "8m"}, ("--memory=8m", "8Gi")),
    "no memory": ({"memory": "0Gi"}, ("--memory=0Gi", "above 0")),
    "a mount that is not absolute": ({"mount": "data"}, ("--mount=data", "/data")),
    "a mount over everything": ({"mount": "/"}, ("--mount=/:", "/data")),
    "a mount with ..": ({"mount": "/data/../etc"}, ("--mount=/data/../etc",)),
    "a mount over the shared memory": (
        {"mount": "/dev/shm/", "command": (*COMMAND, "--directory=/dev/shm/run")},
        ("--mount=/dev/shm/", "shared memory", "/data"),
    ),
    "a mount with a colon": ({"mount": "/da:ta"}, ("--mount=/da:ta", "':'")),
    "no command": ({"command": ()}, ("no command", "after --", "launch.train")),
    "a command without a directory": ({"command": COMMAND[:-1]}, ("no --directory", "--directory=/data/run")),
    "an empty directory": ({"command": (*COMMAND, "--directory=")}, ("no --directory",)),
    "a directory outside the volume": ({"mount": "/runs"}, ("--directory=/data/run", "--mount=/runs")),
    "a directory with ..": (
        {"command": (*COMMAND, "--directory=/data/../x")},
        ("/data/../x", "--mount"),
    ),
    "a directory that begins like the mount": (
        {"command": (*COMMAND, "--directory=/database")},
        ("/database", "--mount"),
    ),
    "a relative directory": ({"command": (*COMMAND, "--directory=run")}, ("--directory=run", "--mount=/data")),
    "a strategy of one process": (
        {"command": ("towers-train", "--directory=/data/run")},
        ("--strategy=towers runs in one", "--strategy=ring"),
    ),
    "a command that starts anew": ({"command": (*COMMAND, "--resume=never")}, ("--resume=never", "omit --resume")),
    "a command that is not UTF-8": ({"command": (*COMMAND, "\udcff")}, ("UTF-8", "script")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_value_and_the_fix(name):
    changed, parts = REFUSED[name]
    with pytest.raises(UserError) as error:
        ring(**changed)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "a"},
        {"name": "a9-b" * 15},
        {"namespace": "9-lives"},
        {"image": "host:5000/a/b@sha256:" + "0" * 64},
        {"volume_claim": "a.b-c"},
        {"workers": 1000},
        {"cpus": "0.5", "memory": "512Mi"},
        {"mount": "/data/"},
        {"command": ("run", "--directory", "/data/run")},
        {"command": ("a script", "--directory=/data/run"), "ps": 2},
        {"command": COMMAND_OF_SERVERS},
        {"command": ("run", "--directory=/elsewhere", "-directory=/data")},
        {"volume_claim": None, "command": ("run", "--directory=run")},
    ],
)
def test_valid_values_are_accepted(changed):
    assert ring(**changed)
