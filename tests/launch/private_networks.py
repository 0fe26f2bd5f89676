"""A mark for tests that need a private network: one with a loopback interface only."""

import pytest

from launch.supervision.held_network import private_network

with private_network() as _network:
    _problem = _network.problem
needs_private_network = pytest.mark.skipif(bool(_problem), reason=f"no private network here: {_problem}")
