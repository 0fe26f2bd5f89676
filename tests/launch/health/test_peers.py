"""The cluster's section: which members answer, why others do not, and this process's own port."""

import socket

import pytest

from launch.health import peers
from strategies.cluster import Cluster
from tests.launch.health.sockets import closed, listening, silent

TIMEOUT_SECONDS = 0.5


def section(addresses, role="worker", index=0):
    return peers.cluster_section(
        Cluster(addresses=addresses, role=role, index=index), timeout_seconds=TIMEOUT_SECONDS
    )


def test_no_problem():
    with listening() as first, listening() as second:
        found = section(
            {
                "worker": (f"127.0.0.1:{closed()}", f"127.0.0.1:{first}"),
                "ps": (f"127.0.0.1:{second}",),
            }
        )
    assert found.problems == ()
    assert found.facts["members"] == "worker 2, ps 1"
    assert found.facts["this process"].startswith("worker:0 on ")
    assert found.facts["own port"].endswith(", free")
    assert found.facts["worker:1"].startswith(f"127.0.0.1:{first}, reached in ")
    assert found.facts["ps:0"].startswith(f"127.0.0.1:{second}, reached in ")
    assert "worker:0" not in found.facts


def test_each_member_that_does_not_answer_is_a_problem():
    with silent() as drops:
        refusing = f"127.0.0.1:{closed()}"
        found = section(
            {"worker": (f"127.0.0.1:{closed()}", refusing, f"127.0.0.1:{drops}", "no-such-host.invalid:1")}
        )
        refused, unanswered, unknown = found.problems
        assert refused.startswith(f"worker:1 at {refusing}, refused; ")
        assert unanswered.startswith(f"worker:2 at 127.0.0.1:{drops}, no answer in 0.5 seconds; ")
        assert unknown.startswith("worker:3 at no-such-host.invalid:1, unknown name")
    fixes = [problem.partition("; ")[2] for problem in found.problems]
    for fix, part in zip(fixes, ("start the member", "firewall", "DNS"), strict=True):
        assert part in fix
    assert found.facts["worker:1"] == f"{refusing}, refused"


def test_the_own_port_is_taken():
    with listening() as port:
        found = section({"worker": (f"10.0.0.1:{port}",)})
    (problem,) = found.problems
    assert f"worker:0 can't listen on port {port}: another process does" in problem
    assert found.facts["own port"] == f"{port}, taken"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_own_port_is_taken_on_ipv6_alone():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        found = section({"worker": (f"[::1]:{port}",)})
    assert found.facts["own port"] == f"{port}, taken"


def test_the_own_port_needs_permission(monkeypatch):
    def is_port_free(port, family):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(peers, "is_port_free", is_port_free)
    (problem,) = section({"worker": ("10.0.0.1:80",)}).problems
    assert problem == "worker:0 can't listen on port 80 (Permission denied); choose a port above 1023"


@pytest.mark.parametrize("addresses", [{}, {"worker": ()}])
def test_an_evaluator_listens_on_no_port(addresses):
    found = section(addresses, role="evaluator")
    assert found.problems == ()
    assert found.facts["own port"] == "none: this process listens on no port"


def test_this_process_does_not_connect_to_itself():
    """Worker 1 connects to worker 0 only."""
    with listening() as port:
        found = section({"worker": (f"127.0.0.1:{port}", "no-such-host.invalid:2")}, index=1)
    assert [name for name in found.facts if name.startswith("worker:")] == ["worker:0"]
