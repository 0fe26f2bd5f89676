"""The kinds of documents a ring can be asked for in, by name."""

import dataclasses
from collections.abc import Callable, Mapping

from launch.manifests import job, job_set, tf_job
from launch.manifests.ring_pods import RingPods
from towers.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to ask for a ring.

    Attributes:
      host: (name of the ring, index) -> host name of a worker's pod.
      documents: everything to apply, in order.
      restarts: what happens when a worker fails, for people; holds {max_restarts}.
      num_added_letters: what the controller adds to a host name and wants within the same bound.
    """

    host: Callable[[str, int], str]
    documents: Callable[[RingPods], list[dict[str, object]]]
    restarts: str
    num_added_letters: int = 0


KINDS: Mapping[str, Kind] = {
    "job": Kind(host=job.host, documents=job.documents, restarts=job.RESTARTS),
    # The controller counts the pod's whole name, with '-' and five letters of its own.
    "jobset": Kind(host=job_set.host, documents=job_set.documents, restarts=job_set.RESTARTS, num_added_letters=6),
    "tfjob": Kind(host=tf_job.host, documents=tf_job.documents, restarts=tf_job.RESTARTS),
}
MAX_HOST_LETTERS = 63


def documents(kind: str, ring: RingPods) -> list[dict[str, object]]:
    """Everything that Kubernetes is to be given for a ring.

    Raises:
      UserError: the pods' names would be too long.
    """
    chosen = KINDS[kind]
    last = chosen.host(ring.name, ring.workers - 1)
    excess = len(last) + chosen.num_added_letters - MAX_HOST_LETTERS
    if excess > 0:
        longest = len(ring.name) - excess
        raise UserError(
            f"--name={ring.name}: the last worker's pod would be {last}, too long by {excess}; "
            f"give a name of at most {longest} letters for {ring.workers} workers as {kind}"
        )
    return chosen.documents(ring)
