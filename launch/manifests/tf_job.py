"""A ring as a TFJob of Kubeflow's training operator, which creates the Services and sets TF_CONFIG."""

from launch.manifests.network import network_policy
from launch.manifests.pod_template import pod_template
from launch.manifests.pods import Pods

RESTARTS = """\
A worker that ends with an error restarts in its pod, at most {max_restarts} times. The other workers then also
end, because they lost a peer, and restart: the ring resumes from its last checkpoint. The operator also restarts
after exit codes 2, 3 and 4, failures that a restart would only repeat, and a lost node fails the whole TFJob:
where that matters use the kind job or jobset. The cluster needs Kubeflow's training operator, version 1."""


def host(name: str, index: int) -> str:
    """The host name of a worker's pod."""
    return f"{name}-worker-{index}"


def documents(pods: Pods) -> list[dict[str, object]]:
    """NetworkPolicy and TFJob."""
    worker = {
        "replicas": pods.workers,
        # Not ExitCode: it treats every code below 128 as final, also 75 (saved, resume) and 5 (a peer was lost).
        "restartPolicy": "OnFailure",
        # Kubeflow's documentation advises this: Istio's proxy in the pod keeps the workers from connecting.
        "template": pod_template(pods, annotations={"sidecar.istio.io/inject": "false"}),
    }
    spec = {
        # The operator sums the restarts of all pods and fails the TFJob when the sum reaches the limit. Each
        # restart of the ring is one restart of every worker.
        "runPolicy": {"backoffLimit": pods.workers * pods.max_restarts + 1},
        # By default the operator ends all workers when worker 0 ends, even if the others have not completed.
        "successPolicy": "AllWorkers",
        "tfReplicaSpecs": {"Worker": worker},
    }
    job = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": pods.metadata, "spec": spec}
    return [network_policy(pods), job]
