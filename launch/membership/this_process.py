"""This process's membership of a cluster, read from the environment."""

import os
from collections.abc import Mapping

from launch.membership.slurm_step import cluster_from_slurm
from launch.membership.tf_config import cluster_from
from strategies.cluster import EVALUATOR, Cluster


def is_evaluator() -> bool:
    """Whether this process is an evaluator, which reads checkpoints and takes no part in training."""
    cluster = cluster_of_this_process()
    return cluster is not None and cluster.role == EVALUATOR


def cluster_of_this_process(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """The cluster of TF_CONFIG, or otherwise of this process's Slurm step; None if there is neither.

    TF_CONFIG overrides Slurm, even if it is '{}': that lets a task of a Slurm step train alone.

    Raises:
      UserError: the variables are set but invalid.
    """
    if "TF_CONFIG" in environ:
        return cluster_from(environ["TF_CONFIG"])
    return cluster_from_slurm(environ)
