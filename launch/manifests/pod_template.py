"""The template from which Kubernetes creates the pods."""

import json
from collections.abc import Mapping, Sequence

from launch.manifests.pods import Pods

# Kubeflow's operator requires these names of the container and the port.
CONTAINER, PORT_NAME = "tensorflow", "tfjob-port"
# Seconds from SIGTERM to SIGKILL: enough to finish a step and write a checkpoint.
SECONDS_TO_SAVE = 120
_INDEX = "JOB_COMPLETION_INDEX"


def pod_template(
    pods: Pods,
    *,
    environment: Sequence[Mapping[str, object]] = (),
    annotations: Mapping[str, str] | None = None,
    **of_pod: object,
) -> dict[str, object]:
    """A PodTemplateSpec.

    Args:
      pods: the pods.
      environment: the container's EnvVars.
      annotations: the pods' annotations.
      **of_pod: further fields of the PodSpec, e.g. restartPolicy.
    """
    volumes = _volumes(pods)
    spec = {
        **of_pod,
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        # Anyone who can connect to TensorFlow's server can read the pod's files, so they must not contain a token
        # for the cluster.
        "automountServiceAccountToken": False,
        "containers": [_container(pods, environment, mounts=[mount for _, mount in volumes])],
    }
    if volumes:
        spec["volumes"] = [volume for volume, _ in volumes]
    about = {"labels": pods.labels} | ({"annotations": dict(annotations)} if annotations else {})
    return {"metadata": about, "spec": spec}


def tf_config_environment(hosts: Sequence[str], port: int) -> list[dict[str, object]]:
    """TF_CONFIG for the pods of an Indexed Job; the text is the same for all pods.

    Kubernetes replaces $(NAME) by the value of a variable that is earlier in the list. The Job would add the index
    at the end, so it is declared first here. TF_CONFIG contains it as a string, because JSON has no $(...) outside
    strings.
    """
    task = {"type": "worker", "index": f"$({_INDEX})"}
    cluster = {"worker": [f"{host}:{port}" for host in hosts]}
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": annotation}}},
        {"name": "TF_CONFIG", "value": json.dumps({"cluster": cluster, "task": task})},
    ]


def _container(pods: Pods, environment, *, mounts) -> dict[str, object]:
    container = {
        "name": CONTAINER,
        "image": pods.image,
        # Kubernetes replaces $(NAME) and reads $$ as $; doubling each $ preserves the command as it was typed.
        "command": [word.replace("$", "$$") for word in pods.command],
        "ports": [{"name": PORT_NAME, "containerPort": pods.port}],
        "resources": _resources(pods),
    }
    if environment:
        container["env"] = list(environment)
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _resources(pods: Pods) -> dict[str, object]:
    """Requests and limits. A CPU limit would stall TensorFlow, which has a thread per core of the node."""
    limits = {"memory": pods.memory}
    if pods.gpus_per_worker:
        limits["nvidia.com/gpu"] = pods.gpus_per_worker
    return {"requests": {"cpu": pods.cpus, "memory": pods.memory}, "limits": limits}


def _volumes(pods: Pods) -> list[tuple[dict[str, object], dict[str, object]]]:
    """(volume of the pod, its VolumeMount) for each volume."""
    volumes = []
    if pods.volume_claim is not None:
        claim = {"name": "run", "persistentVolumeClaim": {"claimName": pods.volume_claim}}
        volumes.append((claim, {"name": "run", "mountPath": pods.mount}))
    if pods.gpus_per_worker > 1:
        # NCCL connects the GPUs of a pod through shared memory, of which a pod has only 64 MiB by default.
        shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        volumes.append((shared, {"name": "shared-memory", "mountPath": "/dev/shm"}))
    return volumes
