"""Clusters for the tests of manifests, and how Kubernetes reads the documents."""

import re

from launch.manifests.kinds import documents
from launch.manifests.pods import Pods

COMMAND = ("python", "-m", "launch.train", "--strategy=ring", "--directory=/data/run")
COMMAND_OF_SERVERS = ("python", "-m", "launch.train", "--strategy=ps", "--directory=/data/run")


def ring(**changed) -> Pods:
    """A ring of three workers, with the arguments `changed` replaced."""
    given = {"name": "resnet", "image": "registry.example/towers:1", "workers": 3, "command": COMMAND}
    return Pods(**given | {"volume_claim": "runs"} | changed)


def with_servers(**changed) -> Pods:
    """A chief, two servers and three workers, with the arguments `changed` replaced."""
    return ring(**{"command": COMMAND_OF_SERVERS, "ps": 2} | changed)


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


def pod_templates(kind: str, pods: Pods) -> dict[str, dict]:
    """The pod templates within the documents of a cluster with servers, by role."""
    found = documents(kind, pods)
    if kind == "job":
        jobs = [document for document in found if document["kind"] == "Job"]
        return {job["metadata"]["name"].rpartition("-")[2]: job["spec"]["template"] for job in jobs}
    spec = found[-1]["spec"]
    if kind == "jobset":
        return {job["name"]: job["template"]["spec"]["template"] for job in spec["replicatedJobs"]}
    return {name.lower(): replicas["template"] for name, replicas in spec["tfReplicaSpecs"].items()}


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
        if "secretKeyRef" in variable.get("valueFrom", {}):
            found[variable["name"]] = "{key} of {name}".format(**variable["valueFrom"]["secretKeyRef"])
        elif "valueFrom" in variable:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = expanded(variable["value"], found)
    return found
