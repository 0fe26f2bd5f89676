"""A cluster as a TFJob of Kubeflow's training operator, which creates the Services and sets TF_CONFIG."""

from launch.manifests.network import network_policy
from launch.manifests.pod_template import pod_template
from launch.manifests.pods import Pods
from strategies.cluster import CHIEF, SERVER, WORKER

RESTARTS = """\
A worker that ends with an error restarts in its pod, at most {max_restarts} times. The other workers then also
end, because they lost a peer, and restart: the ring resumes from its last checkpoint. The operator also restarts
after exit codes 2, 3 and 4, failures that a restart would only repeat, and a lost node fails the whole TFJob:
where that matters use the kind job or jobset. The cluster needs Kubeflow's training operator, version 1."""
RESTARTS_WITH_SERVERS = """\
A process that ends with an error restarts in its pod, at most {max_restarts} times. Training continues without a
lost worker. Without the chief or a server all others end too, because they lost a peer, and restart: the run
resumes from its last checkpoint. The operator also restarts after exit codes 2, 3 and 4, failures that a restart
would only repeat, and a lost node fails the whole TFJob: where that matters use the kind job or jobset. The
cluster needs Kubeflow's training operator, version 1."""

_ROLES = {CHIEF: "Chief", WORKER: "Worker", SERVER: "PS"}


def host(pods: Pods, role: str, index: int) -> str:
    """The host name of a pod."""
    return f"{pods.name}-{role}-{index}"


def documents(pods: Pods) -> list[dict[str, object]]:
    """NetworkPolicy and TFJob."""
    spec = {
        # The operator sums the restarts of all pods and fails the TFJob when the sum reaches the limit. Each
        # restart of the cluster is one restart of every pod.
        "runPolicy": {"backoffLimit": sum(pods.counts.values()) * pods.max_restarts + 1},
        # With a chief the TFJob ends like the chief. Otherwise the operator by default ends all workers when
        # worker 0 ends, even if the others have not completed.
        **({} if pods.has_servers else {"successPolicy": "AllWorkers"}),
        "tfReplicaSpecs": {_ROLES[role]: _replicas(pods, role) for role in pods.counts},
    }
    job = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": pods.metadata, "spec": spec}
    return [network_policy(pods), job]


def _replicas(pods: Pods, role: str) -> dict[str, object]:
    return {
        "replicas": pods.counts[role],
        # Not ExitCode: it treats every code below 128 as final, also 75 (saved, resume) and 5 (a peer was lost).
        "restartPolicy": "OnFailure",
        # Kubeflow's documentation advises this: Istio's proxy in the pod keeps the processes from connecting.
        "template": pod_template(pods, role, annotations={"sidecar.istio.io/inject": "false"}),
    }
