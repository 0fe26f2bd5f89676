"""A ring as a TFJob of Kubeflow's training operator, which makes the Services and sets TF_CONFIG."""

from launch.manifests.network import network_policy
from launch.manifests.pod_template import pod_template
from launch.manifests.ring_pods import RingPods

RESTARTS = """\
A worker that ends with an error is run again in its pod, at most {max_restarts} times. The others then end too,
since a peer was lost, and run again: the ring goes on from its last checkpoint. The operator can't tell exit codes
2, 3 and 4, which a restart would only give again, from others, and calls a lost node the end of the TFJob: where
that matters take the kind job or jobset. The cluster needs Kubeflow's training operator, version 1."""


def host(name: str, index: int) -> str:
    """The host name of a worker's pod."""
    return f"{name}-worker-{index}"


def documents(ring: RingPods) -> list[dict[str, object]]:
    """NetworkPolicy and TFJob."""
    worker = {
        "replicas": ring.workers,
        # Not ExitCode: it takes every code below 128 for final, and so 75 (saved, go on) and 5 (a peer was lost).
        "restartPolicy": "OnFailure",
        # Kubeflow's own advice: with Istio's proxy in the pod the workers don't meet.
        "template": pod_template(ring, annotations={"sidecar.istio.io/inject": "false"}),
    }
    spec = {
        # The operator adds up the restarts of all pods and stops at the limit itself; each restart of the ring is
        # one of every worker.
        "runPolicy": {"backoffLimit": ring.workers * ring.max_restarts + 1},
        # By default the end of worker 0 ends the others, whatever they are at.
        "successPolicy": "AllWorkers",
        "tfReplicaSpecs": {"Worker": worker},
    }
    job = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": ring.metadata, "spec": spec}
    return [network_policy(ring), job]
