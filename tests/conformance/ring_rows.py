"""Runs the rows of a ring, with a process for each worker. As a program, this file is one of these processes.

python -m tests.conformance.ring_rows ROW FILE ONLY_QUICK      with TF_CONFIG set; ONLY_QUICK is 0 or 1
"""

import functools
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping

from launch.membership.tf_config import cluster_from
from strategies.ring.exchange.joining import join_ring
from tests.conformance.rows import ROWS, Row
from tests.conformance.trials import Outcome, Trial, outcomes_of, trials_of
from tests.conftest import make_devices
from tests.launch.workers import Workers

LIMIT_SECONDS = 280


@functools.cache
def outcomes_by_rank(row: Row, only_quick: bool) -> list[Mapping[Trial, list[Outcome]]]:
    """The outcomes of each worker of the row, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{rank}" for rank in range(row.num_workers)]
        commands = [["-m", "tests.conformance.ring_rows", row.name, file, str(int(only_quick))] for file in files]
        with Workers(commands) as workers:
            for ended in workers.ends(LIMIT_SECONDS):
                assert ended.code == 0, ended.err
        found = []
        for file in files:
            with open(file, "rb") as stream:
                found.append(pickle.load(stream))
        return found


def main() -> None:
    make_devices()
    name, file, only_quick = sys.argv[1:]
    (row,) = (row for row in ROWS if row.name == name)
    cluster = cluster_from(os.environ["TF_CONFIG"])
    ring = join_ring(cluster, row.ring, startup_timeout_seconds=60)
    found = {
        trial: outcomes_of(row.make_strategy, trial, row.accumulation, ring=ring)
        for trial in trials_of(row, bool(int(only_quick)))
    }
    with open(file, "wb") as stream:
        pickle.dump(found, stream)


if __name__ == "__main__":
    main()
