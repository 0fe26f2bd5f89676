"""Checks this machine and its cluster, and prints a report to paste into a bug report.

    python -m launch.doctor --directory=runs/NAME --data_dir=DIR
        prints versions, devices, threads, cluster, disk, data and environment, and at the end
        problems: none
    python -m launch.doctor --selftest
        prints the same and the speed of an all-reduce between two processes of this machine, for example
        float32 8 MiB              7.87 ms, 0.99 GiB/s

Exit code 0: no problem; 2: at least one. Each problem is one line at the end, with what to do about it. If
TF_CONFIG is set the doctor tries to connect to every other member, so run it on each machine, in the environment
of the training. It writes no file. It shows texts that may contain a password or token as 'hidden'.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping

from absl import flags

from launch import binary
from launch.flags.checks import positive
from launch.flags.paths import define_path
from launch.health import disk, machine, peers, prepared_sets, selftest, versions
from launch.health.credentials import Credentials
from launch.health.report import as_json, as_text, without_credentials
from launch.health.section import Section
from launch.health.variables import variables as environment_variables
from launch.membership.this_process import cluster_of_this_process
from towers.errors import UserError

FLAGS = flags.FLAGS
# The parent folder of runs without --directory.
_RUNS = "runs"


def cluster_check(variables: Mapping[str, str], *, timeout_seconds: float) -> Section:
    """The section of the cluster, which TF_CONFIG or Slurm's variables describe."""
    try:
        cluster = cluster_of_this_process(variables)
    except UserError as error:
        return peers.invalid_cluster(str(error))
    return (
        peers.no_cluster() if cluster is None else peers.cluster_section(cluster, timeout_seconds=timeout_seconds)
    )


def checks(variables: Mapping[str, str]) -> dict[str, Callable[[], Section]]:
    """All checks by the title of their section, in the order of the report."""
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
    """The check's section; if the check raises an exception, a section that reports it."""
    try:
        return check()
    except Exception as error:
        problem = f"{title}: this check failed with {type(error).__name__}: {error}; report this line as a bug"
        return Section(facts={"check": "failed"}, problems=(problem,))


def _define_flags() -> None:
    define_path(
        "directory",
        None,
        "The run's directory, as given to the training: the doctor checks its free space and write permission. "
        "Default: runs/.",
    )
    define_path("data_dir", None, "Folder of prepared TensorFlow Datasets, as given to the training.")
    flags.DEFINE_float(
        "timeout_seconds", 3.0, "Seconds to wait for an answer from each other member of the cluster."
    )
    flags.DEFINE_bool(
        "selftest", False, "Also measure the speed of an all-reduce between two processes of this machine."
    )
    flags.DEFINE_float(
        "selftest_timeout_seconds",
        60.0,
        "Seconds that each of the self-test's two processes waits for the other one. Raise it on a busy machine.",
    )
    flags.DEFINE_bool("json", False, "Print the report as one JSON object instead of text.")
    positive("timeout_seconds", "selftest_timeout_seconds")


def main(_) -> int:
    """Prints the report; returns exit code 2 if it lists a problem."""
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
    binary.run(main, trains=False)


if __name__ == "__main__":
    cli()
