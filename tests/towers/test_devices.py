"""Devices: which arguments are refused, and how a new process is configured."""

import dataclasses
import json

import pytest
import tensorflow as tf

from tests.launch.nursery import run_forked
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.device_setup import configure_devices
from towers.devices import Devices, default_towers, threads_for
from towers.hardware.cores import num_cores
from towers.hardware.cpu_instructions import cpu_instructions

without_gpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="tests machines without a GPU"
)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ({"num_towers": 0, "kind": "cpu"}, ["num_towers=0"]),
        ({"num_towers": -2, "kind": "cpu"}, ["num_towers=-2"]),
        ({"threads_per_tower": 10**6}, ["threads_per_tower=1000000", "at most"]),
        ({"num_processes": 0}, ["num_processes=0", "at least 1"]),
        ({"cores_per_tower": 0}, ["cores_per_tower=0", "at least 1"]),
        ({"own_gpus": [99]}, ["own_gpus=[99]", "GPUs"]),
        ({"num_towers": 2, "kind": "tpu"}, ["'tpu'", "auto, cpu, gpu"]),
        (
            {"num_towers": 2, "kind": "cpu", "parameter_device": "tpu:0"},
            ["'tpu:0'", "auto, cpu, cpu:K, gpu:K, sharded or replicated"],
        ),
        ({"num_towers": 2, "kind": "cpu", "parameter_device": "cpu:x"}, ["'cpu:x'"]),
        ({"num_towers": 2, "kind": "cpu", "parameter_device": "cpu:9"}, ["'cpu:9'", "cpu:0, cpu:1"]),
        ({"num_towers": 2, "kind": "cpu", "parameter_device": "cpu:2"}, ["'cpu:2'"]),
        ({"zero": 4}, ["zero=4", "use 1, 2 or 3"]),
        ({"zero": 1, "parameter_device": "sharded"}, ["zero=1 with parameter_device='sharded'", "omit"]),
        ({"zero": 3, "parameter_device": "cpu"}, ["zero=3 with parameter_device='cpu'", "sharded; omit"]),
        ({"offload": "optimizer", "zero": 2}, ["offload='optimizer' with zero=2", "omit"]),
        ({"offload": "optimizer", "parameter_device": "gpu:0"}, ["with parameter_device='gpu:0'"]),
        ({"offload": "parameters"}, ["offload='parameters' is unknown", "'optimizer'"]),
    ],
)
def test_what_is_refused(arguments, parts):
    with refused(*parts):
        configure_devices(**arguments)


@without_gpu
@pytest.mark.parametrize(
    "arguments, parts",
    [
        ({"num_towers": 2, "kind": "gpu"}, ["'gpu'", "no GPU", "use cpu"]),
        ({"kind": "gpu"}, ["'gpu'", "no GPU"]),
        ({"num_towers": 2, "parameter_device": "gpu:0"}, ["'gpu:0'", "cpu:0, cpu:1"]),
    ],
)
def test_gpus_where_there_are_none(arguments, parts):
    with refused(*parts):
        configure_devices(**arguments)


def test_more_devices_than_this_process_has():
    tf.constant(1)
    with refused("32 logical CPU devices", "already runs"):
        configure_devices(num_towers=32, kind="cpu")


def test_threads_of_a_tensorflow_that_already_runs_are_those_that_it_has():
    tf.constant(1)
    with refused("threads_per_tower=3", "already runs", "with 1"):
        configure_devices(num_towers=2, kind="cpu", threads_per_tower=3)
    assert configure_devices(num_towers=1, kind="cpu").threads_per_tower == 1


def test_fewer_devices_than_this_process_has():
    devices = configure_devices(num_towers=3, kind="cpu", parameter_device="CPU:1")
    assert devices.towers == cpus(3).towers and devices.num_towers == 3
    assert devices.parameters == "/device:CPU:1"


@pytest.mark.parametrize("num_towers, cores, threads", [(1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 8, 1), (9, 8, 1)])
def test_towers_share_the_cores(num_towers, cores, threads):
    assert threads_for(num_towers, cores) == threads


@pytest.mark.parametrize(
    "cores, num_examples, count",
    [(64, 128, 4), (64, None, 64), (2, 128, 2), (8, 63, 1), (8, 64, 2), (8, 1, 1), (8, 0, 1), (8, 4096, 8)],
)
def test_default_towers_have_32_examples_each(cores, num_examples, count):
    assert default_towers(cores, num_examples) == count


@pytest.mark.parametrize(
    "cores, num_examples, count", [(1, 256, 1), (2, 256, 1), (8, 256, 4), (8, 64, 2), (6, None, 3)]
)
def test_default_towers_have_the_fewest_cores_asked_for(cores, num_examples, count):
    assert default_towers(cores, num_examples, cores_per_tower=2) == count


@pytest.mark.parametrize(
    "cores, num_examples, count, threads",
    [(6, 128, 3, 2), (48, 1024, 24, 2), (7, 192, 6, 1), (5, 128, 4, 1), (6, 256, 6, 1)],
)
def test_default_towers_leave_few_cores_idle(cores, num_examples, count, threads):
    """The balance: a tower of many threads is slower than as many towers of one thread."""
    assert default_towers(cores, num_examples) == count and threads_for(count, cores) == threads


def default_of(cores: int) -> Devices:
    """The devices that `configure_devices` returns on CPUs without a number of towers."""
    return dataclasses.replace(cpus(cores), threads_per_tower=1, default_of_cores=cores)


def test_a_small_batch_lowers_only_a_default_number_of_towers():
    assert cpus(4).for_examples(32) == cpus(4)
    assert default_of(4).for_examples(128) == default_of(4) and default_of(4).notices == []
    lowered = default_of(4).for_examples(64)
    assert lowered.towers == cpus(2).towers
    (notice,) = lowered.notices
    assert notice == (
        "2 towers instead of 4, so that each computes at least 32 examples of a batch; num_towers=2 gives each 2 "
        "threads"
    )


def test_the_advice_uses_all_cores_or_is_left_out():
    of_six = default_of(6).for_examples(128)
    assert of_six.towers == cpus(4).towers and of_six.notices[0].endswith("; num_towers=3 gives each 2 threads")
    assert default_of(5).for_examples(128).notices[0].endswith("at least 32 examples of a batch")


class Gpus:
    """Stands in for TensorFlow's functions that need GPUs, and records their arguments.

    Attributes:
      visible, growing: names of the GPUs that are visible, and of those whose memory grows.
    """

    def __init__(self, monkeypatch, count: int):
        self._found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{k}", "GPU") for k in range(count)]
        self.visible, self.growing = list(range(count)), []
        of_kind, config = tf.config.list_physical_devices, tf.config
        monkeypatch.setattr(
            config, "list_physical_devices", lambda kind: self._found if kind == "GPU" else of_kind(kind)
        )
        monkeypatch.setattr(config, "get_visible_devices", lambda kind: [self._found[k] for k in self.visible])
        monkeypatch.setattr(config, "set_visible_devices", self._set_visible)
        monkeypatch.setattr(
            config.experimental, "set_memory_growth", lambda gpu, on: self.growing.append(self._index(gpu))
        )
        details = {"device_name": "NVIDIA X", "compute_capability": (8, 6)}
        monkeypatch.setattr(config.experimental, "get_device_details", lambda gpu: details)

    def _index(self, gpu) -> int:
        return self._found.index(gpu)

    def _set_visible(self, gpus, kind):
        self.visible = [self._index(gpu) for gpu in gpus]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ({"num_towers": "2"}, ("num_towers='2'", "an integer")),
        ({"threads_per_tower": 1.5}, ("threads_per_tower=1.5", "an integer")),
        ({"batch_size": "32"}, ("batch_size='32'", "an integer")),
        ({"parameter_device": None}, ("parameter_device=None", "a text")),
        ({"own_gpus": 0}, ("own_gpus=0", "a list of indices")),
        ({"own_gpus": ["0"]}, ("own_gpus=['0']", "a list of indices")),
    ],
)
def test_an_argument_of_another_type_is_refused(arguments, parts):
    with refused(*parts):
        configure_devices(**arguments)


def test_gpus_that_the_program_has_divided_are_refused(monkeypatch):
    """TensorFlow raises a ValueError for these."""
    Gpus(monkeypatch, 1)

    def fails(gpu, on):
        raise ValueError("Cannot set memory growth on device when virtual devices configured")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", fails)
    with refused("1 GPUs", "they were divided before", "before the first tensor"):
        configure_devices()


def test_a_process_sees_its_own_gpus_alone(monkeypatch):
    gpus = Gpus(monkeypatch, 4)
    devices = configure_devices(own_gpus=[2, 3])
    assert gpus.visible == gpus.growing == [2, 3]
    assert devices.towers == ("/device:GPU:0", "/device:GPU:1"), "TensorFlow counts visible GPUs from 0"
    assert [gpu.index for gpu in devices.gpus] == [2, 3]
    assert devices.automatic and devices.parameters == "/device:CPU:0"
    assert devices.described == "2 towers on gpu:0 and gpu:1 (NVIDIA X, compute capability 8.6)"
    with refused("num_towers=3", "2 are visible"):
        configure_devices(own_gpus=[2, 3], num_towers=3)
    with refused("own_gpus=[3, 3]", "twice"):
        configure_devices(own_gpus=[3, 3])


@pytest.mark.parametrize("parameter_device, started", [("auto", [0, 1]), ("gpu:2", [0, 1, 2])])
def test_gpus_without_a_tower_or_parameters_are_not_started(monkeypatch, parameter_device, started):
    gpus = Gpus(monkeypatch, 4)
    devices = configure_devices(num_towers=2, parameter_device=parameter_device)
    assert gpus.visible == gpus.growing == started
    assert len(devices.towers) == 2


def test_towers_on_cpus_start_no_gpu(monkeypatch):
    tf.constant(1)
    gpus = Gpus(monkeypatch, 4)
    devices = configure_devices(kind="cpu", num_towers=2)
    assert (gpus.visible, gpus.growing) == ([], [])
    own = {"threads_per_tower": 1, "cpu_instructions": cpu_instructions()}
    assert devices == dataclasses.replace(cpus(2), **own)
    with refused("'gpu:1'", "use one of cpu:0, cpu:1"):
        configure_devices(kind="cpu", num_towers=2, parameter_device="gpu:1")


@pytest.mark.parametrize(
    "arguments, automatic, where",
    [
        ({"parameter_device": "cpu"}, False, {}),
        ({"zero": 1}, False, {"zero": 1}),
        ({"offload": "optimizer"}, False, {"offload": "optimizer"}),
        ({"parameter_device": "replicated"}, False, {"replicated": True}),
        ({"parameter_device": "gpu:1"}, False, {"parameters": "/device:GPU:1"}),
    ],
)
def test_a_place_that_is_asked_for_is_not_chosen(monkeypatch, arguments, automatic, where):
    Gpus(monkeypatch, 2)
    devices = configure_devices(**arguments)
    assert devices.automatic == automatic and not devices.reason
    assert {name: getattr(devices, name) for name in where} == where


PROGRAM = """
import json
import tensorflow as tf
from tensorflow.python.framework import config as tf_config
from towers.device_setup import configure_devices
devices = configure_devices({arguments})
tf.constant(1.0) + 1.0
print(json.dumps({{
    "towers": devices.towers,
    "parameters": devices.parameters,
    "threads_per_tower": devices.threads_per_tower,
    "logical": len(tf.config.list_logical_devices("CPU")),
    "intra": tf.config.threading.get_intra_op_parallelism_threads(),
    "inter": tf.config.threading.get_inter_op_parallelism_threads(),
    "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
    "deterministic": tf_config.is_op_determinism_enabled(),
    "notices": devices.notices,
}}))
"""


@pytest.fixture
def in_new_process(tmp_path):
    """A function that returns devices and threads of a new process after `configure_devices(arguments)`."""

    def found(arguments: str) -> dict:
        (tmp_path / "program.py").write_text(PROGRAM.format(arguments=arguments))
        done = run_forked(str(tmp_path / "program.py"), cwd=tmp_path)
        assert done.code == 0, done.err
        return json.loads(done.out.splitlines()[-1])

    return found


@pytest.mark.full
def test_a_new_process_with_three_towers(in_new_process):
    found = in_new_process('num_towers=3, kind="cpu", parameter_device="cpu:2"')
    assert found["towers"] == list(cpus(3).towers) and found["logical"] == 3
    assert found["parameters"] == "/device:CPU:2"
    assert found["intra"] == found["threads_per_tower"] == max(1, num_cores() // 3)


@pytest.mark.full
@without_gpu
def test_a_new_process_with_one_tower_for_each_core(in_new_process):
    found = in_new_process("")
    assert len(found["towers"]) == found["logical"] == num_cores()
    assert found["intra"] == 1


@pytest.mark.full
@without_gpu
def test_a_new_process_with_a_small_batch(in_new_process):
    found = in_new_process("batch_size=63")
    assert found["towers"] == list(cpus(1).towers) and found["intra"] == num_cores()


@pytest.mark.full
def test_a_new_process_among_many(in_new_process):
    found = in_new_process(f'kind="cpu", num_processes={2 * num_cores()}')
    assert found["towers"] == list(cpus(1).towers)
    assert (found["intra"], found["inter"]) == (1, 2), "operations at once are not for all the machine's cores"


@pytest.mark.full
def test_threads_that_are_asked_for(in_new_process):
    found = in_new_process('num_towers=2, kind="cpu", threads_per_tower=3')
    assert found["intra"] == 3
    assert found["tf32"] and not found["deterministic"] and found["notices"] == []


@pytest.mark.full
def test_kernels_that_are_asked_for(in_new_process):
    found = in_new_process('num_towers=1, kind="cpu", tf32=False, deterministic=True')
    assert found["deterministic"] and not found["tf32"]
    (notice,) = found["notices"]
    assert notice.startswith("deterministic: ")


@pytest.mark.parametrize("tf32, words", [(True, "tf32=False computes"), (False, "not in TensorFloat-32")])
def test_a_run_on_gpus_says_in_what_it_computes(tf32, words):
    towers = ("/device:GPU:0", "/device:GPU:1")
    (notice,) = Devices(towers=towers, parameters="/device:CPU:0", tf32=tf32).notices
    assert words in notice


A, B, C, D = (f"/device:CPU:{index}" for index in range(4))


@pytest.mark.parametrize(
    "groups", [(), ((),), ((A,), (B, C)), ((A, A),), ((A, B), (B, C)), ((A, "/device:CPU:7"),)]
)
def test_groups_that_are_refused(groups):
    with refused(f"groups={groups}", "as many devices each", f"of {A}, {B}, {C}, {D}", "groups(devices.towers)"):
        cpus(4).grouped(groups)


def test_groups_may_leave_a_device_out():
    assert cpus(4).grouped([[A, C]]).num_towers == 1
