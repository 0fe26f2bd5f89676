"""What the environment says of this process: which one of a cluster it is."""

import os
from collections.abc import Mapping

from launch.membership.slurm_step import cluster_from_slurm
from launch.membership.tf_config import cluster_from
from strategies.cluster import EVALUATOR, Cluster


def is_evaluator() -> bool:
    """Whether this process is the evaluator beside a cluster, and takes no part in it."""
    cluster = cluster_of_this_process()
    return cluster is not None and cluster.role == EVALUATOR


def cluster_of_this_process(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """The cluster of TF_CONFIG, or else of the Slurm step that this process is a task of; None if it is alone.

    TF_CONFIG goes first, also where it says '{}': so a task of a step is kept apart from the others.

    Raises:
      UserError: what is set there describes no cluster.
    """
    if "TF_CONFIG" in environ:
        return cluster_from(environ["TF_CONFIG"])
    return cluster_from_slurm(environ)
