"""How many processes share a machine's cores."""

import pytest

from launch.membership import shared_cores
from launch.membership.shared_cores import VARIABLE, processes_here
from strategies.cluster import Cluster
from tests.towers.user_errors import refused

RING = {"chief": ("a:1",), "worker": ("a:2", "b:1", "a:3")}
SERVERS = {"chief": ("a:1",), "worker": ("a:2", "a:3", "b:1", "b:2"), "ps": ("a:4", "b:3")}


@pytest.fixture(autouse=True)
def all_cores(monkeypatch):
    monkeypatch.setattr(shared_cores, "may_use_all_cores", lambda: True)


@pytest.mark.parametrize(
    "addresses, role, index, count",
    [
        pytest.param(RING, "chief", 0, 3, id="ring_chief"),
        pytest.param(RING, "worker", 2, 3, id="ring_worker"),
        pytest.param(RING, "worker", 1, 1, id="ring_alone_on_its_host"),
        pytest.param(SERVERS, "worker", 3, 2, id="worker_of_servers"),
        pytest.param(SERVERS, "chief", 0, 2, id="chief_of_servers"),
        pytest.param(RING, "evaluator", 0, 1, id="evaluator_has_no_host"),
    ],
)
def test_members_on_one_host_share_its_cores(addresses, role, index, count):
    assert processes_here(Cluster(addresses=addresses, role=role, index=index), {}) == count


def test_a_process_without_a_cluster():
    assert processes_here(None, {}) == 1


def test_the_launcher_says_it():
    cluster = Cluster(addresses=RING, role="chief", index=0)
    assert processes_here(cluster, {VARIABLE: "5"}) == processes_here(None, {VARIABLE: "5"}) == 5


@pytest.fixture
def some_cores(monkeypatch):
    monkeypatch.setattr(shared_cores, "may_use_all_cores", lambda: False)


@pytest.mark.usefixtures("some_cores")
def test_a_process_bound_to_some_cores_has_them_alone():
    assert processes_here(Cluster(addresses=RING, role="chief", index=0), {}) == 1


@pytest.mark.usefixtures("some_cores")
class TestOneContainer:
    """Members with loopback addresses, on a machine that has more cores than they may use."""

    CLUSTER = Cluster(addresses={"worker": ("localhost:1", "LOCALHOST:2", "localhost:3")}, role="worker", index=0)

    def test_they_divide_a_limit_of_cpu_time(self, monkeypatch):
        monkeypatch.setattr(shared_cores, "core_quota", lambda: 6.0)
        monkeypatch.setattr(shared_cores, "usable_cpus", lambda process=0: range(8) if process else range(4))
        assert processes_here(self.CLUSTER, {}) == 3

    @pytest.mark.parametrize("of_parent, count", [(4, 3), (8, 1)], ids=["of_all", "of_this_process_alone"])
    def test_they_divide_an_affinity_that_the_parent_has_too(self, of_parent, count, monkeypatch):
        monkeypatch.setattr(shared_cores, "core_quota", lambda: None)
        found = lambda process=0: range(of_parent) if process else range(4)  # noqa: E731
        monkeypatch.setattr(shared_cores, "usable_cpus", found)
        assert processes_here(self.CLUSTER, {}) == count


@pytest.mark.parametrize("text", ["", "0", "two"])
def test_a_variable_that_is_no_number(text):
    with refused(f"TOWERS_PROCESSES_HERE={text!r}", "from 1", "unset it"):
        processes_here(None, {VARIABLE: text})
