"""A ring as an Indexed Job, which needs Kubernetes 1.29 or later and no other controller."""

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


def host(name: str, index: int) -> str:
    """The host name of a worker's pod."""
    return f"{name}-{index}"


def documents(pods: Pods) -> list[dict[str, object]]:
    """Service, NetworkPolicy and Job."""
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.metadata, "spec": _spec(pods)}
    return [headless_service(pods), network_policy(pods), job]


def indexed(pods: Pods) -> dict[str, object]:
    """The part of a JobSpec that gives each pod an index."""
    return {"completionMode": "Indexed", "completions": pods.workers, "parallelism": pods.workers}


def _spec(pods: Pods) -> dict[str, object]:
    """A JobSpec that counts failures per worker.

    When one worker is lost, every worker of the ring fails. If failures were counted per Job, the limit would have
    to be workers * max_restarts, and Kubernetes would double its delay at each of these failures: a ring of eight
    would wait ten minutes after its first lost worker. Counted per worker, the limit is max_restarts and the first
    delay ten seconds.
    """
    hosts = [f"{host(pods.name, index)}.{pods.name}" for index in range(pods.workers)]
    return {
        **indexed(pods),
        "backoffLimitPerIndex": pods.max_restarts,
        # If one worker exceeds its limit the Job fails: a ring can't continue without it.
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [FAIL_AT_ONCE, IGNORE_DISRUPTION]},
        "template": pod_template(
            pods,
            environment=tf_config_environment(hosts, pods.port),
            restartPolicy="Never",  # podFailurePolicy requires it: a failed pod is replaced, not restarted.
            subdomain=pods.name,
        ),
    }
