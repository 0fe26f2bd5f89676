"""On TensorFlow's engine too, workers pull frozen weights once for each start of the chief."""

import pytest

from launch.binary import DONE
from tests.launch.server_groups import ServerGroup

pytestmark = [pytest.mark.timeout(120), pytest.mark.full]


def test_workers_keep_frozen_weights_until_the_chief_sets_others():
    command = ("-m", "tests.strategies.distribute.frozen_program")
    with ServerGroup(command, workers=1, servers=2) as group:
        ends = group.ends(60)
    for name, ended in ends.items():
        assert ended.code == DONE, (name, ended.err)
    assert int(ends["worker:0"].out) == 2
    assert float(ends["chief:0"].out) < 1e-5
