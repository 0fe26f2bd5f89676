"""The template from which Kubernetes creates the pods of a ring."""

import json
from collections.abc import Mapping, Sequence

from launch.manifests.ring_pods import RingPods

# Kubeflow's operator requires these names of the container and the port.
CONTAINER, PORT_NAME = "tensorflow", "tfjob-port"
# Seconds from SIGTERM to SIGKILL: enough to finish a step and write a checkpoint.
SECONDS_TO_SAVE = 120
_INDEX = "JOB_COMPLETION_INDEX"


def pod_template(
    ring: RingPods,
    *,
    environment: Sequence[Mapping[str, object]] = (),
    annotations: Mapping[str, str] | None = None,
    **of_pod: object,
) -> dict[str, object]:
    """A PodTemplateSpec.

    Args:
      ring: the ring that the pods form.
      environment: the container's EnvVars.
      annotations: the pods' annotations.
      **of_pod: further fields of the PodSpec, e.g. restartPolicy.
    """
    volumes = _volumes(ring)
    spec = {
        **of_pod,
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        # Anyone who can connect to TensorFlow's server can read the pod's files, so they must not contain a token
        # for the cluster.
        "automountServiceAccountToken": False,
        "containers": [_container(ring, environment, mounts=[mount for _, mount in volumes])],
    }
    if volumes:
        spec["volumes"] = [volume for volume, _ in volumes]
    about = {"labels": ring.labels} | ({"annotations": dict(annotations)} if annotations else {})
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


def _container(ring: RingPods, environment, *, mounts) -> dict[str, object]:
    container = {
        "name": CONTAINER,
        "image": ring.image,
        # Kubernetes replaces $(NAME) and reads $$ as $; doubling each $ preserves the command as it was typed.
        "command": [word.replace("$", "$$") for word in ring.command],
        "ports": [{"name": PORT_NAME, "containerPort": ring.port}],
        "resources": _resources(ring),
    }
    if environment:
        container["env"] = list(environment)
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _resources(ring: RingPods) -> dict[str, object]:
    """Requests and limits. A CPU limit would stall TensorFlow, which has a thread per core of the node."""
    limits = {"memory": ring.memory}
    if ring.gpus_per_worker:
        limits["nvidia.com/gpu"] = ring.gpus_per_worker
    return {"requests": {"cpu": ring.cpus, "memory": ring.memory}, "limits": limits}


def _volumes(ring: RingPods) -> list[tuple[dict[str, object], dict[str, object]]]:
    """(volume of the pod, its VolumeMount) for each volume."""
    volumes = []
    if ring.volume_claim is not None:
        claim = {"name": "run", "persistentVolumeClaim": {"claimName": ring.volume_claim}}
        volumes.append((claim, {"name": "run", "mountPath": ring.mount}))
    if ring.gpus_per_worker > 1:
        # NCCL connects the GPUs of a pod through shared memory, of which a pod has only 64 MiB by default.
        shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        volumes.append((shared, {"name": "shared-memory", "mountPath": "/dev/shm"}))
    return volumes
