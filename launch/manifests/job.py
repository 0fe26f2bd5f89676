"""A cluster as an Indexed Job for each role, which needs Kubernetes 1.29 or later and no other controller."""

from launch import binary
from launch.manifests.network import headless_service, network_policy
from launch.manifests.pod_template import pod_template, tf_config_environment
from launch.manifests.pods import Pods

# Exit codes of failures that a restart would only repeat.
HOPELESS_CODES = (binary.USER_ERROR, binary.DIFFERS, binary.NOT_FINITE)
FAIL_AT_ONCE = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(HOPELESS_CODES)}}
# A drained or lost node is not a failure of the worker.
IGNORE_DISRUPTION = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}

RESTARTS = """\
Kubernetes replaces a worker that ends with an error or whose node is lost, at most {max_restarts} times. The
other workers then also end, because they lost a peer, and are replaced too: the ring resumes from its last
checkpoint. Exit codes 2, 3 and 4 mean failures that a restart would only repeat; they fail the Job at once. If a
worker is lost after others have completed, its replacement waits for them in vain: the kind jobset, which
restarts all workers, avoids this."""
RESTARTS_WITH_SERVERS = """\
Kubernetes replaces a pod that ends with an error or whose node is lost, at most {max_restarts} times. Training
continues without a lost worker, and its replacement joins. Without the chief or a server all others end too,
because they lost a peer, and are replaced: the run resumes from its last checkpoint. Exit codes 2, 3 and 4 mean
failures that a restart would only repeat; they fail the Job of that role at once, and the others when they miss
it. The kind jobset restarts or ends all roles together."""


def host(pods: Pods, role: str, index: int) -> str:
    """The host name of a pod."""
    return f"{_job_name(pods, role)}-{index}"


def _job_name(pods: Pods, role: str) -> str:
    return f"{pods.name}-{role}" if pods.has_servers else pods.name


def documents(pods: Pods) -> list[dict[str, object]]:
    """Service, NetworkPolicy and a Job for each role."""
    jobs = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": pods.metadata | {"name": _job_name(pods, role)},
            "spec": _spec(pods, role),
        }
        for role in pods.counts
    ]
    return [headless_service(pods), network_policy(pods), *jobs]


def indexed(pods: Pods, role: str) -> dict[str, object]:
    """The part of a JobSpec that gives each pod of a role an index."""
    count = pods.counts[role]
    return {"completionMode": "Indexed", "completions": count, "parallelism": count}


def replaced_alone(pods: Pods) -> dict[str, object]:
    """The part of a JobSpec that replaces a failed pod without the others.

    It counts failures per pod. When one worker is lost, every worker of the ring fails. If failures were counted
    per Job, the limit would have to be workers * max_restarts, and Kubernetes would double its delay at each of
    these failures: a ring of eight would wait ten minutes after its first lost worker. Counted per pod, the limit
    is max_restarts and the first delay ten seconds.
    """
    return {
        "backoffLimitPerIndex": pods.max_restarts,
        # If one pod exceeds its limit the Job fails: a ring can't continue without it.
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [FAIL_AT_ONCE, IGNORE_DISRUPTION]},
    }


def _spec(pods: Pods, role: str) -> dict[str, object]:
    return {
        **indexed(pods, role),
        **replaced_alone(pods),
        "template": pod_template(
            pods,
            role,
            environment=tf_config_environment(pods, role, host),
            restartPolicy="Never",  # podFailurePolicy requires it: a failed pod is replaced, not restarted.
            subdomain=pods.name,
        ),
    }
