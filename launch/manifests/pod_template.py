"""The template from which Kubernetes creates the pods."""

import json
from collections.abc import Callable, Mapping, Sequence

from launch import binary
from launch.manifests.pods import SHARED_MEMORY, Pods
from strategies.cluster import SERVER
from towers.errors import UserError

# Kubeflow's operator requires these names of the container and the port.
CONTAINER, PORT_NAME = "tensorflow", "tfjob-port"
_INDEX = "JOB_COMPLETION_INDEX"
# Linux starts no program with a variable of 128 KiB, its name included.
MAX_TF_CONFIG_BYTES = 128 * 1024 - 16
_SECRET, _SECRET_KEY = "TOWERS_SECRET", "secret"


def pod_template(
    pods: Pods,
    role: str,
    *,
    environment: Sequence[Mapping[str, object]] = (),
    annotations: Mapping[str, str] | None = None,
    **of_pod: object,
) -> dict[str, object]:
    """A PodTemplateSpec for the pods of one role.

    Args:
      pods: all pods.
      role: 'chief', 'worker' or 'ps'.
      environment: the container's EnvVars.
      annotations: the pods' annotations.
      **of_pod: further fields of the PodSpec, e.g. restartPolicy.
    """
    num_gpus = 0 if role == SERVER else pods.gpus_per_worker
    volumes = _volumes(pods, num_gpus)
    spec = {
        **of_pod,
        "terminationGracePeriodSeconds": binary.SECONDS_TO_SAVE,
        # Anyone who can connect to TensorFlow's server can read the pod's files, so they must not contain a token
        # for the cluster.
        "automountServiceAccountToken": False,
        "containers": [_container(pods, num_gpus, environment, mounts=[mount for _, mount in volumes])],
    }
    if volumes:
        spec["volumes"] = [volume for volume, _ in volumes]
    about = {"labels": pods.labels} | ({"annotations": dict(annotations)} if annotations else {})
    return {"metadata": about, "spec": spec}


def tf_config_environment(pods: Pods, role: str, host: Callable[[Pods, str, int], str]) -> list[dict[str, object]]:
    """TF_CONFIG for the pods of an Indexed Job, all of one role; the text is the same for all of them.

    Kubernetes replaces $(NAME) by the value of a variable that is earlier in the list. The Job would add the
    variable of the index at the end, so this declares it first. TF_CONFIG contains the index as a string, because
    JSON allows $(...) only in strings.

    Args:
      pods: all pods.
      role: role of the Job's pods.
      host: function of the pods, a role and an index that returns the pod's host name.

    Raises:
      UserError: the text would be too long for the environment.
    """
    task = {"type": role, "index": f"$({_INDEX})"}
    cluster = {
        of_role: [f"{host(pods, of_role, index)}.{pods.name}:{pods.port}" for index in range(count)]
        for of_role, count in pods.counts.items()
    }
    text = json.dumps({"cluster": cluster, "task": task})
    if len(text) > MAX_TF_CONFIG_BYTES:
        raise UserError(
            f"--name={pods.name}: TF_CONFIG names all pods, of {pods.described}, in {len(text)} bytes, but Linux "
            f"allows {MAX_TF_CONFIG_BYTES}; choose a shorter name or fewer pods"
        )
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": annotation}}},
        {"name": "TF_CONFIG", "value": text},
    ]


def secret_document(pods: Pods) -> dict[str, object]:
    """The Secret that all pods of the run have in their environment."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": pods.metadata,
        "stringData": {_SECRET_KEY: pods.secret},
    }


def _secret_environment(pods: Pods) -> dict[str, object]:
    return {"name": _SECRET, "valueFrom": {"secretKeyRef": {"name": pods.name, "key": _SECRET_KEY}}}


def _container(pods: Pods, num_gpus: int, environment, *, mounts) -> dict[str, object]:
    container = {
        "name": CONTAINER,
        "image": pods.image,
        # Kubernetes replaces $(NAME) and reads $$ as $; doubling each $ preserves the command as it was typed.
        "command": [word.replace("$", "$$") for word in pods.command],
        "ports": [{"name": PORT_NAME, "containerPort": pods.port}],
        "resources": _resources(pods, num_gpus),
        "env": [_secret_environment(pods), *environment],
    }
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _resources(pods: Pods, num_gpus: int) -> dict[str, object]:
    """Requests and limits.

    Without GPUs the requested cores are a limit too: a process counts those, so it has as many towers and threads
    on any node. With GPUs TensorFlow has a thread for each core of the node, and a limit would stall these.
    """
    limits: dict[str, object] = {"memory": pods.memory}
    limits |= {"nvidia.com/gpu": num_gpus} if num_gpus else {"cpu": pods.cpus}
    return {"requests": {"cpu": pods.cpus, "memory": pods.memory}, "limits": limits}


def _volumes(pods: Pods, num_gpus: int) -> list[tuple[dict[str, object], dict[str, object]]]:
    """(volume of the pod, its VolumeMount) for each volume."""
    volumes = []
    if pods.volume_claim is not None:
        claim = {"name": "run", "persistentVolumeClaim": {"claimName": pods.volume_claim}}
        volumes.append((claim, {"name": "run", "mountPath": pods.mount}))
    if num_gpus > 1:
        # NCCL connects the GPUs of a pod through shared memory, of which a pod has only 64 MiB by default.
        shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        volumes.append((shared, {"name": "shared-memory", "mountPath": SHARED_MEMORY}))
    return volumes
