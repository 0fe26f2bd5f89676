"""Runs the rows of parameter servers. As a program, this file is one process of their cluster.

python -m tests.conformance.server_rows ROW FILE ONLY_QUICK      with TF_CONFIG set; ONLY_QUICK is 0 or 1
"""

import functools
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Mapping

from launch.membership.tf_config import cluster_from
from strategies.cluster import CHIEF, SERVER
from strategies.parameter_servers import joined_servers, run_server, run_worker
from strategies.servers.membership import ServersMembership
from tests.conformance.rows import ROWS, Row
from tests.conformance.trials import Outcome, Trial, outcomes_of, trials_of
from tests.conftest import make_devices
from tests.launch.server_groups import ServerGroup

LIMIT_SECONDS = 280


@functools.cache
def outcomes_at_the_chief(row: Row, only_quick: bool) -> Mapping[Trial, list[Outcome]]:
    """The outcomes of the chief of the row."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tests.conformance.server_rows", row.name, f"{folder}/found", str(int(only_quick))]
        with ServerGroup(command, workers=row.num_workers, servers=row.num_servers) as group:
            for name, ended in group.ends(LIMIT_SECONDS).items():
                assert ended.code == 0, (name, ended.err)
        with open(f"{folder}/found", "rb") as stream:
            return pickle.load(stream)


def main() -> None:
    make_devices()
    name, file, only_quick = sys.argv[1:]
    (row,) = (row for row in ROWS if row.name == name)
    cluster = cluster_from(os.environ["TF_CONFIG"])
    membership = ServersMembership(cluster=cluster, options=row.servers, startup_timeout_seconds=100)
    membership = joined_servers(membership, num_cpus=len(row.devices.towers) + 1)
    trials = trials_of(row, bool(int(only_quick)))
    found = {trial: _take_part(row, trial, membership) for trial in trials}
    if membership.role == CHIEF:
        with open(file, "wb") as stream:
            pickle.dump(found, stream)


def _take_part(row: Row, trial: Trial, membership: ServersMembership) -> list[Outcome] | None:
    options = trial.options(row.accumulation)
    if membership.role == CHIEF:
        return outcomes_of(row.make_strategy, trial, row.accumulation, servers=membership)
    if membership.role == SERVER:
        run_server(options, membership)
    else:

        def before_step(step: int) -> None:
            if membership.cluster.index == 1 and step == 8:
                time.sleep(row.late_seconds)

        run_worker(trial.task, row.devices, options, membership, shares=row.tower_shares, before_step=before_step)
    return None


if __name__ == "__main__":
    main()
