"""A cluster as a JobSet (jobset.sigs.k8s.io), which restarts all processes when one that others need fails."""

from launch.manifests.job import FAIL_AT_ONCE, indexed, replaced_alone
from launch.manifests.network import network_policy
from launch.manifests.pod_template import pod_template, tf_config_environment
from launch.manifests.pods import Pods
from strategies.cluster import CHIEF, WORKER

RESTARTS = """\
When a worker ends with an error or its node is lost, the controller replaces all workers, at most {max_restarts}
times, and the ring resumes from its last checkpoint. Exit codes 2, 3 and 4 mean failures that a restart would only
repeat; they fail the JobSet at once. The cluster needs the JobSet controller, version 0.6 or later."""
RESTARTS_WITH_SERVERS = """\
When a worker ends with an error or its node is lost, it is replaced, and training continues meanwhile. When the
chief or a server does, the controller replaces all pods, at most {max_restarts} times, and the run resumes from
its last checkpoint. Exit codes 2, 3 and 4 mean failures that a restart would only repeat; they fail the JobSet
at once. The cluster needs the JobSet controller, version 0.6 or later."""


def host(pods: Pods, role: str, index: int) -> str:
    """The host name of a pod: JOBSET-JOB-JOB_INDEX-POD_INDEX. A role is a job."""
    return f"{pods.name}-{role}-0-{index}"


def documents(pods: Pods) -> list[dict[str, object]]:
    """NetworkPolicy and JobSet; the controller creates the Service."""
    # 'PodFailurePolicy' is the failure reason of a Job that FAIL_AT_ONCE ended.
    give_up = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.max_restarts, "rules": [give_up]},
        "replicatedJobs": [
            {"name": role, "replicas": 1, "template": {"spec": _job_spec(pods, role)}} for role in pods.counts
        ],
    }
    if pods.has_servers:
        # A worker that was replaced too late to join must not keep a complete run from ending.
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": [CHIEF]}
    about = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": pods.metadata}
    return [network_policy(pods), {**about, "spec": spec}]


def _job_spec(pods: Pods, role: str) -> dict[str, object]:
    if pods.has_servers and role == WORKER:
        failures = replaced_alone(pods)
    else:
        # The first failure fails the Job, and the JobSet then restarts all its Jobs.
        failures = {"backoffLimit": 0, "podFailurePolicy": {"rules": [FAIL_AT_ONCE]}}
    environment = tf_config_environment(pods, role, host)
    return {
        **indexed(pods, role),
        **failures,
        "template": pod_template(pods, role, environment=environment, restartPolicy="Never"),
    }
