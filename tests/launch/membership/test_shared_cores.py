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


@pytest.mark.usefixtures("some_cores")
@pytest.mark.parametrize(
    "num_cpus, num_cores, of_step, count",
    [
        pytest.param(32, 32, "32", 3, id="unbound"),
        pytest.param(32, 16, "32", 3, id="unbound_with_hyperthreads"),
        pytest.param(32, 16, "16", 3, id="unbound_where_slurm_counts_cores"),
        pytest.param(10, 10, "32", 1, id="bound"),
        pytest.param(10, 5, "32", 1, id="bound_with_hyperthreads"),
        pytest.param(10, 5, "15", 1, id="bound_where_slurm_counts_cores"),
        pytest.param(16, 16, "32", 1, id="bound_to_sockets"),
        pytest.param(32, 32, "", 1, id="without_slurm"),
    ],
)
def test_tasks_that_slurm_does_not_bind_divide_the_step_s_cores(monkeypatch, num_cpus, num_cores, of_step, count):
    monkeypatch.setattr(shared_cores, "usable_cpus", lambda process=0: range(num_cpus))
    monkeypatch.setattr(shared_cores, "physical_cores", lambda cpus: num_cores)
    environ = {"SLURM_CPUS_ON_NODE": of_step}
    assert processes_here(Cluster(addresses=RING, role="chief", index=0), environ) == count


@pytest.mark.usefixtures("some_cores")
@pytest.mark.parametrize("of_step, count", [("16", 1), ("8", 2)], ids=["own", "of_the_step"])
def test_two_bound_tasks_with_all_hyperthreads_of_their_cores(monkeypatch, of_step, count):
    """A task with 16 hyperthreads: its own, if Slurm counts 16 cores for both; the step's, if it counts 8."""
    monkeypatch.setattr(shared_cores, "usable_cpus", lambda process=0: range(16))
    monkeypatch.setattr(shared_cores, "physical_cores", lambda cpus: 8)
    ring = {"worker": ("a:1", "a:2")}
    environ = {"SLURM_CPUS_ON_NODE": of_step}
    assert processes_here(Cluster(addresses=ring, role="worker", index=0), environ) == count


@pytest.mark.parametrize("text", ["", "0", "two"])
def test_a_variable_that_is_no_number(text):
    with refused(f"TOWERS_PROCESSES_HERE={text!r}", "from 1", "unset it"):
        processes_here(None, {VARIABLE: text})
