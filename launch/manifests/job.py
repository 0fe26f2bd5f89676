"""A ring as an Indexed Job, which every Kubernetes has from 1.29 on."""

from launch import binary
from launch.manifests.network import headless_service, network_policy
from launch.manifests.pod_template import pod_template, tf_config_environment
from launch.manifests.ring_pods import RingPods

# What the same command would only do again.
HOPELESS_CODES = (binary.USER_ERROR, binary.DIFFERS, binary.NOT_FINITE)
FAIL_AT_ONCE = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(HOPELESS_CODES)}}
# A node that was drained or taken away is nobody's failure.
IGNORE_DISRUPTION = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}

RESTARTS = """\
A worker that ends with an error, or whose node is lost, is made anew, at most {max_restarts} times. The others
then end too, since a peer was lost, and are made anew as well: the ring goes on from its last checkpoint. Exit
codes 2, 3 and 4 stand for what a restart would only do again, and fail the Job at once. A worker lost after others
have ended well stays alone: there the kind jobset, which begins all of them anew, does better."""


def host(name: str, index: int) -> str:
    """The host name of a worker's pod."""
    return f"{name}-{index}"


def documents(ring: RingPods) -> list[dict[str, object]]:
    """Service, NetworkPolicy and Job."""
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": ring.metadata, "spec": _spec(ring)}
    return [headless_service(ring), network_policy(ring), job]


def indexed(ring: RingPods) -> dict[str, object]:
    """The part of a JobSpec that numbers the pods."""
    return {"completionMode": "Indexed", "completions": ring.workers, "parallelism": ring.workers}


def _spec(ring: RingPods) -> dict[str, object]:
    """A JobSpec whose failures are counted by worker.

    One worker lost is a failure of every worker. Counted over the Job the limit would have to be workers times
    restarts; worse, Kubernetes would double the wait at each of these failures, and a ring of eight would wait ten
    minutes after its first. Counted by worker the limit is the number of restarts, and the first wait ten seconds.
    """
    hosts = [f"{host(ring.name, index)}.{ring.name}" for index in range(ring.workers)]
    return {
        **indexed(ring),
        "backoffLimitPerIndex": ring.max_restarts,
        # One worker given up is the end of all: a ring can't go on without it.
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [FAIL_AT_ONCE, IGNORE_DISRUPTION]},
        "template": pod_template(
            ring,
            environment=tf_config_environment(hosts, ring.port),
            restartPolicy="Never",  # podFailurePolicy demands it: a failed pod is replaced, not run again.
            subdomain=ring.name,
        ),
    }
