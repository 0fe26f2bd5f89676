"""The memory of real processes: a ring's rank 0 writes and reads others' optimizer state piece by piece."""

import json

import pytest

from tests.launch.workers import Workers
from tests.strategies.ring import saving_program as program

pytestmark = [pytest.mark.timeout(200), pytest.mark.full]

LIMIT_SECONDS = 150
# malloc gives large blocks back at once, so that the resident memory is what is in use.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "262144"}
# Half of Adam's two slots.
OF_THE_OTHER = program.PARAMETER_BYTES
# Pieces of 1 MiB, and the largest parameter (4 MiB) a few times.
ALLOWED = OF_THE_OTHER // 3


def test_rank_0_never_has_the_others_state(tmp_path):
    command = ["-m", "tests.strategies.ring.saving_program", str(tmp_path)]
    with Workers([command] * 2, environments=dict.fromkeys(range(2), RETURNED)) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    assert [end.code for end in ends] == [0, 0], ends[0].err
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["save"] < ALLOWED, found
    assert found["restore"] < ALLOWED, found
    assert found["all at once"] > OF_THE_OTHER, found
