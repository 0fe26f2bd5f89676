"""The rows of parameter servers: all their processes go through all trials; run as a program, one of these.

python -m tests.conformance.server_rows ROW FILE      with TF_CONFIG set
"""

import functools
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping

import tests.conftest  # noqa: F401 (makes the devices)
from launch.membership.tf_config import cluster_from
from strategies.cluster import CHIEF, SERVER
from strategies.servers.membership import ServersPlace, run_server, run_worker
from tests.conformance.rows import ROWS, Row
from tests.conformance.trials import Outcome, Trial, outcomes_of, trials_of
from tests.launch.server_groups import ServerGroup

LIMIT_SECONDS = 280


@functools.cache
def outcomes_at_the_chief(row: Row) -> Mapping[Trial, list[Outcome]]:
    """What the chief of the row found."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tests.conformance.server_rows", row.name, f"{folder}/found"]
        with ServerGroup(command, workers=row.num_workers, servers=row.num_servers) as group:
            for name, ended in group.ends(LIMIT_SECONDS).items():
                assert ended.code == 0, (name, ended.err)
        with open(f"{folder}/found", "rb") as stream:
            return pickle.load(stream)


def main() -> None:
    name, file = sys.argv[1:]
    (row,) = (row for row in ROWS if row.name == name)
    cluster = cluster_from(os.environ["TF_CONFIG"])
    place = ServersPlace(cluster=cluster, options=row.servers, startup_timeout_seconds=100)
    found = {trial: _take_part(row, trial, place) for trial in trials_of(row.batch_stats)}
    if place.role == CHIEF:
        with open(file, "wb") as stream:
            pickle.dump(found, stream)


def _take_part(row: Row, trial: Trial, place: ServersPlace) -> list[Outcome] | None:
    options = trial.options(row.accumulation)
    if place.role == CHIEF:
        return outcomes_of(row.make_strategy, trial, row.accumulation, servers=place)
    if place.role == SERVER:
        run_server(options, place)
    else:
        run_worker(trial.task, row.devices, options, place, shares=row.tower_shares)
    return None


if __name__ == "__main__":
    main()
