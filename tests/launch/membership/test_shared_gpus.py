"""Which GPUs of a machine are a process's own. These tests need no GPU: the number is an argument."""

import pytest

from launch.membership.shared_gpus import VARIABLE, environment_of_shared, num_in_machine, own_gpus
from strategies.cluster import Cluster
from tests.towers.user_errors import refused

RING = {"chief": ("a:1",), "worker": ("a:2", "b:1", "a:3", "a:4")}
SERVERS = {"chief": ("a:1",), "worker": ("a:2", "a:3", "b:1", "b:2"), "ps": ("a:4", "c:3")}
CHIEF_ALONE = {"chief": ("z:1",), "worker": ("a:2",), "ps": ("z:4",)}
LOOPBACK = {"worker": ("127.0.0.1:1", "127.0.0.1:2")}
# srun --nodes=1 --ntasks=4
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "a",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_PROCID": "2",
}


@pytest.fixture
def driver(tmp_path):
    """The folder of a driver with eight GPUs."""
    for index in range(8):
        (tmp_path / "gpus" / f"0000:{index}").mkdir(parents=True)
    return tmp_path


def own(num_found, addresses, role="worker", index=0, environ=None, driver=None):
    cluster = None if addresses is None else Cluster(addresses=addresses, role=role, index=index)
    named = {} if driver is None else {"driver": driver}
    return own_gpus(num_found, cluster, environ or {}, **named)


@pytest.mark.parametrize(
    "addresses, role, index, num_found, indices",
    [
        pytest.param(RING, "chief", 0, 8, (0, 1), id="chief_of_a_ring"),
        pytest.param(RING, "worker", 0, 8, (2, 3), id="second_on_its_machine"),
        pytest.param(RING, "worker", 3, 8, (6, 7), id="last_on_its_machine"),
        pytest.param(RING, "worker", 1, 8, tuple(range(8)), id="alone_on_its_machine"),
        pytest.param(RING, "worker", 0, 7, (1,), id="three_idle"),
        pytest.param(SERVERS, "worker", 1, 4, (2, 3), id="worker_of_servers"),
        pytest.param(SERVERS, "worker", 3, 4, (2, 3), id="its_chief_is_elsewhere"),
        pytest.param(SERVERS, "ps", 0, 4, (), id="server_beside_workers"),
        pytest.param(SERVERS, "ps", 1, 4, (), id="server_alone"),
        pytest.param(SERVERS, "chief", 0, 4, (), id="chief_beside_workers"),
        pytest.param(CHIEF_ALONE, "chief", 0, 4, (0, 1, 2, 3), id="chief_without_workers_on_its_machine"),
        pytest.param(LOOPBACK, "evaluator", 0, 4, (), id="evaluator_beside_workers"),
        pytest.param(RING, "worker", 0, 0, (), id="no_gpu"),
        pytest.param(None, "", 0, 4, (0, 1, 2, 3), id="no_cluster"),
    ],
)
def test_processes_of_one_machine_divide_its_gpus(addresses, role, index, num_found, indices):
    assert own(num_found, addresses, role, index).indices == indices


def test_all_gpus_have_one_process_and_no_two_share_one():
    members = [("chief", 0), ("worker", 0), ("worker", 2), ("worker", 3)]
    found = [index for role, at in members for index in own(8, RING, role, at).indices]
    assert sorted(found) == list(range(8))


def test_what_the_user_is_told():
    assert own(8, RING, index=0).notice == "process 2 of the 4 on this machine: GPUs 2 to 3 of 8"
    assert own(7, RING, index=0).notice.endswith("GPU 1 of 7; 3 of them are idle: 4 processes have 1 each")
    assert own(8, RING, index=1).notice == ""
    assert "the workers on this machine use its GPUs" in own(8, SERVERS, "chief").notice
    assert "CUDA_VISIBLE_DEVICES of its own" in own(8, LOOPBACK, "evaluator").notice


def test_more_processes_than_gpus():
    with refused("4 processes of this machine find 2 GPUs", "start 2 of them", "--tower_device=cpu"):
        own(2, RING)


class TestGiven:
    """A process that was given GPUs of its own uses all that it finds."""

    @pytest.mark.parametrize("at_start", [None, "0,1,2,3"])
    def test_the_launcher_knows_what_all_got(self, at_start):
        inherited = {} if at_start is None else {"CUDA_VISIBLE_DEVICES": at_start}
        everybody = inherited | environment_of_shared(inherited)
        assert VARIABLE in everybody
        assert own(4, RING, environ=everybody).indices == (1,)
        assert own(2, RING, environ=everybody | {"CUDA_VISIBLE_DEVICES": "2,3"}).indices == (0, 1)

    def test_by_hand_some_of_the_machine_are_given_and_all_are_shared(self, driver):
        def found(num_found, **environ):
            return own(num_found, RING, environ=environ, driver=driver).indices

        assert found(2, CUDA_VISIBLE_DEVICES="2,3") == (0, 1)
        assert found(8, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7") == (2, 3)
        assert found(4) == (1,), "a container has four, and nobody named any"
        assert found(1, CUDA_VISIBLE_DEVICES="MIG-1b2c") == (0,)

    @pytest.mark.parametrize(
        "of_slurm",
        [
            pytest.param({"SLURM_GPUS_PER_TASK": "1"}, id="gpus_per_task"),
            pytest.param({"SLURM_GPU_BIND": "per_task:1"}, id="gpu_bind"),
            pytest.param({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, id="tres_per_task"),
            pytest.param({"SLURM_GPUS_ON_NODE": "4"}, id="fewer_than_the_step"),
            pytest.param({"SLURM_STEP_GPUS": "0-2,6"}, id="fewer_than_listed"),
            pytest.param({"SLURM_JOB_GPUS": "0-2,6"}, id="fewer_than_the_job"),
            pytest.param({"SLURM_GPU_BIND": "verbose,map_gpu:0,1"}, id="verbose_binding"),
            pytest.param({"SLURM_TRES_BIND": "gres/gpu:single:1"}, id="tres_bind"),
        ],
    )
    def test_slurm_gives_each_task_its_own(self, of_slurm, driver):
        """With control groups each task finds its own GPU as number 0: CUDA_VISIBLE_DEVICES is 0 in all tasks."""
        environ = STEP | {"CUDA_VISIBLE_DEVICES": "0"} | of_slurm
        assert own(1, RING, environ=environ, driver=driver).indices == (0,)

    @pytest.mark.parametrize(
        "of_slurm",
        [
            pytest.param({"SLURM_GPUS_ON_NODE": "4"}, id="of_node"),
            pytest.param({"SLURM_JOB_GPUS": "4,5,6,7"}, id="of_job"),
            pytest.param({"SLURM_STEP_GPUS": "0-3", "SLURM_JOB_GPUS": "0-7"}, id="a_step_with_fewer_than_its_job"),
            pytest.param(
                {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "1"}, id="number_per_task_but_unbound"
            ),
            pytest.param({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPU_BIND": "verbose,none"}, id="verbose"),
            pytest.param({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPU_BIND": "closest"}, id="closest_is_all"),
        ],
    )
    def test_tasks_that_find_all_gpus_of_the_step_divide_them(self, of_slurm, driver):
        environ = STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPU_BIND": "none"} | of_slurm
        assert own(4, RING, environ=environ, driver=driver).indices == (1,)

    def test_slurm_gives_two_tasks_the_gpus_of_their_socket(self, driver):
        environ = STEP | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPU_BIND": "closest"}
        with refused("4 processes of this machine find 2 of the step's 4 GPUs each", "srun --gpu-bind=none"):
            own(2, RING, environ=environ, driver=driver)
        with refused("4 processes of this machine find 2 of the step's 4 GPUs each"):
            own(2, None, environ=environ, driver=driver)
        alone_on_a_socket = {"worker": ("a:1", "a:2")}
        assert own(2, alone_on_a_socket, environ=environ, driver=driver).indices == (0, 1)

    @pytest.mark.parametrize(
        "environ",
        [
            pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-1b2c"}, id="container"),
            pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-1b2c"}, id="by_hand_where_the_driver_says_nothing"),
        ],
    )
    def test_too_few_for_all_but_named_are_this_process_s(self, environ, tmp_path):
        """For example containers with a GPU each, all in one machine's network and so with one host name."""
        assert own(1, RING, environ=environ, driver=tmp_path).indices == (0,)
        with refused("4 processes of this machine find 1 GPU"):
            own(1, RING, environ={"NVIDIA_VISIBLE_DEVICES": "all"}, driver=tmp_path)

    def test_processes_of_one_launcher_are_in_one_container(self, tmp_path):
        with refused("4 processes of this machine find 1 GPU"):
            own(1, RING, environ={"NVIDIA_VISIBLE_DEVICES": "GPU-1b2c", VARIABLE: "all"}, driver=tmp_path)

    def test_tasks_of_a_step_that_train_alone_divide_them_too(self):
        assert own(4, None, environ=STEP | {"SLURM_GPUS_ON_NODE": "4"}).indices == (2,)

    def test_an_evaluator_on_a_machine_without_workers_has_its_gpus(self):
        assert own(2, {"worker": ("203.0.113.1:1", "203.0.113.2:1")}, "evaluator").indices == (0, 1)

    def test_an_evaluator_may_be_given_gpus(self, driver):
        environ = {"CUDA_VISIBLE_DEVICES": "7"}
        assert own(1, RING, "evaluator", environ=environ, driver=driver).indices == (0,)


def test_the_driver_counts_the_gpus_of_the_machine(driver, tmp_path):
    assert num_in_machine(driver) == 8
    assert num_in_machine(tmp_path / "none") == 0
