"""Rings for the tests of manifests, and how Kubernetes reads the documents."""

import re

from launch.manifests.kinds import documents
from launch.manifests.pods import Pods

COMMAND = ("python", "-m", "launch.train", "--strategy=ring", "--directory=/data/run")


def ring(**changed) -> Pods:
    """A ring of three workers, with the arguments `changed` replaced."""
    given = {"name": "resnet", "image": "registry.example/towers:1", "workers": 3, "command": COMMAND}
    return Pods(**given | {"volume_claim": "runs"} | changed)


def of_kind(kind: str, pods: Pods) -> dict[str, dict]:
    """The ring's documents by their Kubernetes kind; there is at most one of each."""
    found = {document["kind"]: document for document in documents(kind, pods)}
    assert len(found) == len(documents(kind, pods))
    return found


def pod_template(kind: str, pods: Pods) -> dict:
    """The pod template within the documents."""
    *_, last = documents(kind, pods)
    spec = last["spec"]
    if kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["tfReplicaSpecs"]["Worker"]["template"] if kind == "tfjob" else spec["template"]


def expanded(text: str, variables: dict[str, str]) -> str:
    """The text as Kubernetes expands it: $(NAME) becomes the variable's value if it exists, and $$ becomes $."""

    def replacement(match):
        if match.group() == "$$":
            return "$"
        return variables.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", replacement, text)


def environment_of(template: dict, index: int) -> dict[str, str]:
    """The environment of the pod with this index; a variable's value may refer to earlier variables."""
    fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
    found = {}
    for variable in template["spec"]["containers"][0].get("env", []):
        if "valueFrom" in variable:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = expanded(variable["value"], found)
    return found
