"""A mark for tests that need hosts, which are network namespaces of this machine."""

import pytest

from launch.supervision.network_namespaces import why_no_hosts

_reason = why_no_hosts()
needs_network_namespaces = pytest.mark.skipif(bool(_reason), reason=f"no network namespaces here: {_reason}")
