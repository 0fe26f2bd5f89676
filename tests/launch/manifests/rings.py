"""Rings to write down, and what Kubernetes does with what is written."""

import re

from launch.manifests.kinds import documents
from launch.manifests.ring_pods import RingPods

COMMAND = ("python", "-m", "launch.train", "--strategy=ring", "--directory=/data/run")


def ring(**changed) -> RingPods:
    """A ring of three, or as changed."""
    given = {"name": "resnet", "image": "registry.example/towers:1", "workers": 3, "command": COMMAND}
    return RingPods(**given | {"volume_claim": "runs"} | changed)


def of_kind(kind: str, pods: RingPods) -> dict[str, dict]:
    """Its documents by their own kind, of which there may be one each."""
    found = {document["kind"]: document for document in documents(kind, pods)}
    assert len(found) == len(documents(kind, pods))
    return found


def pod_template(kind: str, pods: RingPods) -> dict:
    """Where each kind keeps it."""
    *_, last = documents(kind, pods)
    spec = last["spec"]
    if kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["tfReplicaSpecs"]["Worker"]["template"] if kind == "tfjob" else spec["template"]


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes reads values and commands: $(NAME) is the variable where there is one, and $$ is $."""

    def replacement(match):
        if match.group() == "$$":
            return "$"
        return variables.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", replacement, text)


def environment_of(template: dict, index: int) -> dict[str, str]:
    """The variables of the pod with this index, each seeing those before it."""
    about = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
    found = {}
    for variable in template["spec"]["containers"][0].get("env", []):
        if "valueFrom" in variable:
            found[variable["name"]] = about[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = expanded(variable["value"], found)
    return found
