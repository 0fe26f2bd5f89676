"""The kinds of Kubernetes resources that can run a ring, by name."""

import dataclasses
from collections.abc import Callable, Mapping

from launch.manifests import job, job_set, tf_job
from launch.manifests.pods import Pods
from towers.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of resource that runs the pods.

    Attributes:
      host: (name of the ring, index of a worker) -> host name of the worker's pod.
      documents: pods -> the Kubernetes documents to apply, in order.
      restarts: text for the user about what happens when a worker fails; contains {max_restarts}.
      num_added_letters: letters that the controller adds to a host name and counts in its length.
    """

    host: Callable[[str, int], str]
    documents: Callable[[Pods], list[dict[str, object]]]
    restarts: str
    num_added_letters: int = 0


KINDS: Mapping[str, Kind] = {
    "job": Kind(host=job.host, documents=job.documents, restarts=job.RESTARTS),
    # The controller limits the length of the pod's name, which is the host name, '-' and five random letters.
    "jobset": Kind(host=job_set.host, documents=job_set.documents, restarts=job_set.RESTARTS, num_added_letters=6),
    "tfjob": Kind(host=tf_job.host, documents=tf_job.documents, restarts=tf_job.RESTARTS),
}
MAX_HOST_LETTERS = 63


def documents(kind: str, pods: Pods) -> list[dict[str, object]]:
    """The Kubernetes documents that run a ring, in the order in which to apply them.

    Raises:
      UserError: the pods' names would be too long.
    """
    chosen = KINDS[kind]
    last = chosen.host(pods.name, pods.workers - 1)
    excess = len(last) + chosen.num_added_letters - MAX_HOST_LETTERS
    if excess > 0:
        longest = len(pods.name) - excess
        raise UserError(
            f"--name={pods.name}: the host name of the last worker's pod, {last}, would be too long by {excess}; "
            f"choose a name of at most {longest} letters for {pods.workers} workers as {kind}"
        )
    return chosen.documents(pods)
