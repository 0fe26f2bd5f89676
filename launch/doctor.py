"""Looks at this machine and its cluster, for a bug report.

    python -m launch.doctor --directory=runs/NAME --data_dir=DIR
        prints versions, devices, threads, cluster, disk, data and environment, and at the end
        problems: none
    python -m launch.doctor --selftest
        the same, and before the end how fast two processes of this machine add up gradients in a ring, as
        float32 8 MiB              7.87 ms, 0.99 GiB/s

Exit code 0 when nothing is wrong; 2 when something is: each problem is a line at the end, with the way out. With
TF_CONFIG set it tries to connect to every other member, so run it on each machine as the training is run there.
Nothing is written, and whatever looks like a password or token is shown as 'hidden'.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping

from absl import flags

from launch import binary
from launch.flags.checks import positive
from launch.health import disk, machine, peers, prepared_sets, selftest, versions
from launch.health.credentials import Credentials
from launch.health.report import as_json, as_text, without_credentials
from launch.health.section import Section
from launch.health.variables import variables as environment_variables
from launch.membership.this_process import cluster_of_this_process
from towers.errors import UserError

FLAGS = flags.FLAGS
# Where a run is kept that has no --directory.
_RUNS = "runs"


def cluster_check(variables: Mapping[str, str], *, timeout_seconds: float) -> Section:
    """The section of the cluster, from TF_CONFIG or what Slurm set."""
    try:
        cluster = cluster_of_this_process(variables)
    except UserError as error:
        return peers.invalid_cluster(str(error))
    return (
        peers.no_cluster() if cluster is None else peers.cluster_section(cluster, timeout_seconds=timeout_seconds)
    )


def checks(variables: Mapping[str, str]) -> dict[str, Callable[[], Section]]:
    """All checks by title, in the order of the report."""
    found = {
        "versions": versions.versions,
        "devices": functools.partial(machine.devices, variables),
        "threads": functools.partial(machine.threads, variables),
        "cluster": functools.partial(cluster_check, variables, timeout_seconds=FLAGS.timeout_seconds),
        "disk": functools.partial(disk.disk, FLAGS.directory or _RUNS),
        "data": functools.partial(prepared_sets.data, FLAGS.data_dir),
        "environment": functools.partial(environment_variables, variables),
    }
    if FLAGS.selftest:
        seconds = FLAGS.selftest_timeout_seconds
        found["selftest"] = functools.partial(selftest.selftest, variables, timeout_seconds=seconds)
    return found


def section_of(title: str, check: Callable[[], Section]) -> Section:
    """What the check says; one that fails is a problem of its own and takes no other along."""
    try:
        return check()
    except Exception as error:
        problem = f"{title}: this check itself failed, {type(error).__name__}: {error}; report that too"
        return Section(facts={"check": "failed"}, problems=(problem,))


def _define_flags() -> None:
    flags.DEFINE_string("directory", None, "Directory of a run, as in training; default: under runs/.")
    flags.DEFINE_string("data_dir", None, "Folder of prepared TensorFlow Datasets.")
    flags.DEFINE_float("timeout_seconds", 3.0, "How long a member of the cluster may take to answer.")
    flags.DEFINE_bool("selftest", False, "Time all-reduce between two processes of this machine, too.")
    flags.DEFINE_float("selftest_timeout_seconds", 60.0, "How long these two wait for each other.")
    flags.DEFINE_bool("json", False, "Print one JSON object instead.")
    positive("timeout_seconds", "selftest_timeout_seconds")


def main(_) -> int:
    """Prints the report; 2 if it holds a problem."""
    variables = dict(os.environ)
    credentials = Credentials.of_environment(variables)
    report = {
        title: without_credentials(title, section_of(title, check), credentials)
        for title, check in checks(variables).items()
    }
    sys.stdout.write((as_json if FLAGS.json else as_text)(report))
    return binary.USER_ERROR if any(section.problems for section in report.values()) else binary.DONE


def cli() -> None:
    """Console script."""
    _define_flags()
    binary.run(main)


if __name__ == "__main__":
    cli()
