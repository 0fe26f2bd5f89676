"""The measurement of our own kernels: what it compares, which it reports as on, and that it counts CPU time."""

import time

import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

import launch.benchmark  # noqa: F401 (defines the flags)
from launch.measuring import measured_kernels
from launch.measuring.measured_kernels import measure_kernels
from tests.towers.partitioned_graphs import recorded_graphs
from towers import options
from towers.devices import Devices

FLAGS = flags.FLAGS
CPU = "/device:CPU:0"
AVX512, AMX = ("avx2", "avx512f"), ("avx2", "avx512f", "amx_bf16", "fast_bfloat16")
WINOGRAD = ("winograd_channels, 64x16x16x32", "winograd_channels, 64x8x8x64")
AS_CHANNELS = ("examples_as_channels, 64x8x8x64", "examples_as_channels, 64x7x7x256")
OFF_WITH_AMX = "examples_as_channels, 64x15x15x64"
RELU = "compiled_relu, relu, 64x8x8x64"
PRODUCTS = "float32_products, 64x8x8x64"
BATCH_NORM = "batch_norm, 64x32x32x16"


@pytest.fixture(autouse=True)
def parsed_flags():
    if not FLAGS.is_parsed():
        FLAGS.mark_as_parsed()
    with flagsaver.flagsaver():
        yield


def enabled(kernels) -> set[str]:
    return {name for name, is_on in vars(kernels).items() if is_on}


def test_each_kernel_is_measured_alone_beside_none(monkeypatch):
    monkeypatch.setattr(measured_kernels, "_steps", lambda one, kernels: enabled(kernels))
    monkeypatch.setattr(measured_kernels, "_in_turn", lambda ours, theirs: {"ours": ours, "theirs": theirs})
    monkeypatch.setattr(measured_kernels, "_sums", lambda: iter(()))
    for one in measure_kernels()["kernels"]:
        assert (one["ours"], one["theirs"]) == ({one["kernel"].split(",")[0]}, set())


@pytest.mark.full
@pytest.mark.parametrize(
    "instructions, precision, on",
    [
        (("avx2",), "float32", {f"compiled_{BATCH_NORM}", *WINOGRAD}),
        (AMX, "bfloat16", {f"fused_{BATCH_NORM}", *AS_CHANNELS, RELU}),
        (AMX, "float32", {f"fused_{BATCH_NORM}", WINOGRAD[-1]}),
        (AVX512, "bfloat16", {f"fused_{BATCH_NORM}", WINOGRAD[-1], PRODUCTS, RELU}),
        ((*AVX512, "fast_bfloat16"), "bfloat16", {f"fused_{BATCH_NORM}", *AS_CHANNELS, OFF_WITH_AMX, RELU}),
        (("avx2",), "bfloat16", {f"compiled_{BATCH_NORM}", *WINOGRAD, PRODUCTS}),
    ],
)
def test_on_are_those_that_a_run_uses(monkeypatch, instructions, precision, on):
    devices = Devices(towers=(CPU,), parameters=CPU, threads_per_tower=1, cpu_instructions=frozenset(instructions))
    monkeypatch.setattr(options, "runs_onednn", lambda: True)
    monkeypatch.setattr(measured_kernels, "devices_from_flags", lambda: devices)
    monkeypatch.setattr(measured_kernels, "_in_turn", lambda ours, theirs: {})
    FLAGS.precision = precision
    found = {one["kernel"]: one["on"] for one in measure_kernels()["kernels"]}
    shapes = {f"fused_{BATCH_NORM}", f"compiled_{BATCH_NORM}", *AS_CHANNELS, OFF_WITH_AMX}
    shapes |= {*WINOGRAD, PRODUCTS, RELU}
    assert {name for name in shapes if found[name]} == on
    assert found["compiled_activations, gelu, 64x1024"] and not found["compiled_activations, gelu, 64x256"]
    assert not found["compiled_relu, relu, 64x4x4x64"]


def test_both_passes_run_on_the_kernel_in_its_precision_and_without_it_on_kerass(monkeypatch):
    FLAGS.precision = "bfloat16"
    monkeypatch.setattr(measured_kernels, "_LAYERS", measured_kernels._LAYERS[:1])
    monkeypatch.setattr(measured_kernels, "_sums", lambda: iter(()))
    ops = []

    def graphs_of(*steps):
        for step in steps:
            with recorded_graphs() as graphs:
                step()
            nodes = [node for node in graphs.nodes if "FusedBatchNorm" in node.op]
            ops.append({(node.op, node.attr["T"].type, node.attr["is_training"].b) for node in nodes})
        return {}

    monkeypatch.setattr(measured_kernels, "_in_turn", graphs_of)
    measure_kernels()
    (ours, theirs), bfloat16 = ops, tf.bfloat16.as_datatype_enum
    assert len(ours) == 2 and all(how == [bfloat16, True] for _, *how in ours) and theirs == set()


def test_the_ratio_is_of_our_cpu_time_to_theirs():
    """TensorFlow's kernel takes longer by the clock here, because it waits."""
    FLAGS.measured_steps = 3

    def ours():
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    def theirs():
        time.sleep(0.03)
        sum(range(100_000))

    found = measured_kernels._in_turn(ours, theirs)
    assert found["ratio"] > 2 and found["tensorflow_ms"] < 10 <= found["ours_ms"] < 20
