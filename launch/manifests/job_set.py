"""A ring as a JobSet (jobset.sigs.k8s.io), which restarts all workers when one fails."""

from launch.manifests.job import FAIL_AT_ONCE, indexed
from launch.manifests.network import network_policy
from launch.manifests.pod_template import pod_template, tf_config_environment
from launch.manifests.pods import Pods

RESTARTS = """\
When a worker ends with an error or its node is lost, the controller replaces all workers, at most {max_restarts}
times, and the ring resumes from its last checkpoint. Exit codes 2, 3 and 4 mean failures that a restart would only
repeat; they fail the JobSet at once. The cluster needs the JobSet controller, version 0.6 or later."""

_JOB = "worker"


def host(name: str, index: int) -> str:
    """The host name of a worker's pod: JOBSET-JOB-JOB_INDEX-POD_INDEX."""
    return f"{name}-{_JOB}-0-{index}"


def documents(pods: Pods) -> list[dict[str, object]]:
    """NetworkPolicy and JobSet; the controller makes the Service."""
    # 'PodFailurePolicy' is the failure reason of a Job that FAIL_AT_ONCE ended.
    give_up = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": pods.max_restarts, "rules": [give_up]},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": _job_spec(pods)}}],
        },
    }
    return [network_policy(pods), job_set]


def _job_spec(pods: Pods) -> dict[str, object]:
    hosts = [f"{host(pods.name, index)}.{pods.name}" for index in range(pods.workers)]
    return {
        **indexed(pods),
        # The first failure fails the Job, and the JobSet then restarts all workers.
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [FAIL_AT_ONCE]},
        "template": pod_template(pods, environment=tf_config_environment(hosts, pods.port), restartPolicy="Never"),
    }
