"""One pod of a ring, as the template from which Kubernetes makes them all."""

import json
from collections.abc import Mapping, Sequence

from launch.manifests.ring_pods import RingPods

# Kubeflow's operator looks for a container and a port of these names.
CONTAINER, PORT_NAME = "tensorflow", "tfjob-port"
# From SIGTERM to SIGKILL: a step has to end and a checkpoint to be written.
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
      ring: what is run.
      environment: EnvVars of the container.
      annotations: of each pod.
      **of_pod: more of the PodSpec, as restartPolicy.
    """
    volumes = _volumes(ring)
    spec = {
        **of_pod,
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        # Whoever reaches TensorFlow's server can read a pod's files: none of them shall open the cluster.
        "automountServiceAccountToken": False,
        "containers": [_container(ring, environment, mounts=[mount for _, mount in volumes])],
    }
    if volumes:
        spec["volumes"] = [volume for volume, _ in volumes]
    about = {"labels": ring.labels} | ({"annotations": dict(annotations)} if annotations else {})
    return {"metadata": about, "spec": spec}


def tf_config_environment(hosts: Sequence[str], port: int) -> list[dict[str, object]]:
    """TF_CONFIG for the pods of an Indexed Job, the same text for all of them.

    Kubernetes puts the index in where $(...) stands. It knows only variables that stand earlier in the list, so
    the index, which the Job would add at the end, is declared here first. Within JSON it can't stand as a number.
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
        # Kubernetes reads $(NAME), and $$ as one $: so the command stays as it was typed.
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
    """Cores are promised and not bounded: TensorFlow has a thread for each of the node's, which a bound stalls."""
    limits = {"memory": ring.memory}
    if ring.gpus_per_worker:
        limits["nvidia.com/gpu"] = ring.gpus_per_worker
    return {"requests": {"cpu": ring.cpus, "memory": ring.memory}, "limits": limits}


def _volumes(ring: RingPods) -> list[tuple[dict[str, object], dict[str, object]]]:
    """Volumes of the pod, each with its VolumeMount."""
    volumes = []
    if ring.volume_claim is not None:
        claim = {"name": "run", "persistentVolumeClaim": {"claimName": ring.volume_claim}}
        volumes.append((claim, {"name": "run", "mountPath": ring.mount}))
    if ring.gpus_per_worker > 1:
        # NCCL joins the GPUs of a pod through shared memory, of which a pod has 64 MiB unless told otherwise.
        shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        volumes.append((shared, {"name": "shared-memory", "mountPath": "/dev/shm"}))
    return volumes
