"""The kinds of Kubernetes resources that can run a cluster, by name."""

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType

from launch.manifests import job, job_set, tf_job
from launch.manifests.pod_template import secret_document
from launch.manifests.pods import Pods
from towers.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of resource that runs the pods.

    Attributes:
      host: (pods, role, index) -> host name of a pod.
      documents: pods -> the Kubernetes documents to apply, in order.
      restarts: text for the user about what happens when a worker of a ring fails; contains {max_restarts}.
      restarts_with_servers: the same for a process of a cluster with parameter servers.
      num_added_letters: letters that the controller adds to a host name and counts in its length.
    """

    host: Callable[[Pods, str, int], str]
    documents: Callable[[Pods], list[dict[str, object]]]
    restarts: str
    restarts_with_servers: str
    num_added_letters: int = 0


def _kind(module: ModuleType, *, num_added_letters: int = 0) -> Kind:
    return Kind(
        host=module.host,
        documents=module.documents,
        restarts=module.RESTARTS,
        restarts_with_servers=module.RESTARTS_WITH_SERVERS,
        num_added_letters=num_added_letters,
    )


KINDS: Mapping[str, Kind] = {
    "job": _kind(job),
    # The controller limits the length of the pod's name, which is the host name, '-' and five random letters.
    "jobset": _kind(job_set, num_added_letters=6),
    "tfjob": _kind(tf_job),
}
MAX_HOST_LETTERS = 63


def documents(kind: str, pods: Pods) -> list[dict[str, object]]:
    """The Kubernetes documents that run the pods, in the order in which to apply them.

    Raises:
      UserError: the pods' names would be too long.
    """
    chosen = KINDS[kind]
    longest_host = max((chosen.host(pods, role, count - 1) for role, count in pods.counts.items()), key=len)
    excess = len(longest_host) + chosen.num_added_letters - MAX_HOST_LETTERS
    if excess > 0:
        longest = len(pods.name) - excess
        raise UserError(
            f"--name={pods.name}: the host name of a pod, {longest_host}, would be too long by {excess}; "
            f"choose a name of at most {longest} letters for {pods.described} as {kind}"
        )
    return [secret_document(pods), *chosen.documents(pods)]
