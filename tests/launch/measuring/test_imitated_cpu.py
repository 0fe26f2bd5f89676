"""--isa applies to all measured processes, also to peers as TensorFlow would run there; the results name it."""

import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

import launch.benchmark
from launch.measuring.comparison import not_compared
from launch.measuring.groups import GROUPS
from launch.measuring.imitated_cpu import check_isa, imitation
from launch.measuring.results import results
from launch.measuring.tables import table
from tests.towers.user_errors import refused
from towers.hardware.cpu_instructions import AVX512, cpu_instructions

FLAGS = flags.FLAGS


@pytest.fixture
def peers(tmp_path):
    for program in ("keras_step.py", "torch_step.py"):
        (tmp_path / program).touch()
    if not FLAGS.is_parsed():
        FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(peers=str(tmp_path), torch="python-of-torch", isa="avx2"):
        yield tmp_path


@pytest.mark.full
def test_all_rows_run_as_on_this_cpu(peers):
    rows = [row for group in ("towers", "ring", "input", "pipeline", "cifar_fast") for row in GROUPS[group]()]
    for row in rows:
        assert row.work.isa == "avx2"
        assert row.variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
        assert row.variables["TF_ENABLE_ONEDNN_OPTS"] == ("0" if row.is_peer else "1")
        assert row.variables["ATEN_CPU_CAPABILITY"] == "avx2"
    left_out = {row.name for row in rows if row.left_out}
    assert {"towers 2, bfloat16", "towers 1, bfloat16"} <= left_out
    assert not any(row.left_out for row in rows if row.is_peer)


def test_without_it_nothing_is_set(peers):
    assert imitation("none", is_peer=True) == {}
    with flagsaver.flagsaver(isa="none"):
        assert all("ONEDNN_MAX_CPU_ISA" not in row.variables for row in GROUPS["towers"]())


@pytest.mark.parametrize("isa, expected", [("avx2", "0"), ("avx512", "0"), ("avx512_bf16", "1")])
def test_peers_have_onednn_where_tensorflow_switches_it_on(isa, expected):
    assert imitation(isa, is_peer=True)["TF_ENABLE_ONEDNN_OPTS"] == expected


def test_the_results_name_it(peers):
    (row, *_) = GROUPS["towers"]()
    found = results([row], {row.name: [{"images_per_second": 1.0}] * 2}, launch.benchmark.environment_now())
    assert "resnet20, 256, avx2" in table(found)[2]
    (of_peers,) = (line for line in table(found) if line.startswith("imitated CPU: peers ran with"))
    assert "TF_ENABLE_ONEDNN_OPTS=0" in of_peers
    with flagsaver.flagsaver(isa="none"):
        (plain, *_) = GROUPS["towers"]()
    other = results([plain], {plain.name: [{"images_per_second": 1.0}] * 2}, {})
    assert not_compared(other, found) == ["towers 2: not compared, other work: isa none -> avx2"]


@pytest.mark.parametrize(
    "has, isa, advice",
    [
        ("avx2", "avx512", "use --isa=avx2, or omit it"),
        ("avx2 avx512f", "avx512_bf16", "use --isa=avx2 or --isa=avx512, or omit it"),
        ("asimd bf16", "avx2", "; omit it"),
    ],
)
def test_a_cpu_with_fewer_instructions_is_refused(tmp_path, has, isa, advice):
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags\t\t: {has}\n")
    with refused(f"--isa={isa}: this CPU has no ", advice):
        check_isa(isa, info)
    check_isa("none", info)
    check_isa(isa, tmp_path / "absent")


def test_user_s_flags_of_xla_stay():
    found = imitation("avx512", is_peer=False, environment={"XLA_FLAGS": "--xla_dump_to=x"})
    assert found["XLA_FLAGS"] == "--xla_dump_to=x --xla_cpu_max_isa=AVX512"


_KERNELS = """
import launch
import tensorflow as tf
images, kernel = tf.ones([4, 8, 8, 16]), tf.ones([3, 3, 16, 16])
tf.nn.conv2d(images, kernel, 1, "SAME")
print(tf.function(lambda x: x * tf.exp(x), jit_compile=True)(tf.ones([64])).shape)
"""


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.skipif(AVX512 not in cpu_instructions(), reason="a CPU without AVX-512")
def test_no_kernel_with_avx512_runs(monkeypatch):
    for name, value in imitation("avx2", is_peer=False).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ONEDNN_VERBOSE", "1")
    done = subprocess.run([sys.executable, "-c", _KERNELS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    kernels = [line.split(",")[6] for line in done.stdout.splitlines() if ",primitive,exec,cpu," in line]
    assert any("avx2" in kernel for kernel in kernels), done.stdout
    assert not [kernel for kernel in kernels if "avx512" in kernel or "amx" in kernel]
