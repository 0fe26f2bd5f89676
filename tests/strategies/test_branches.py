"""The strategy 'branches': which device computes what, its numbers, its checkpoints, and what it refuses."""

import collections
import dataclasses
import functools
import re

import keras
import pytest
from keras import layers

from strategies.branches import branches_strategy
from strategies.registry import build_strategy
from strategies.training.checkpoints import Checkpoints
from tests.towers.branches.branched_networks import small_inception
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import TinyTask, assert_close, dense_task, images, parameters_of, vectors
from tests.towers.user_errors import refused
from towers.branches.options import BranchOptions
from towers.options import StepOptions
from towers.updates.rules import Adam, Momentum
from towers.updates.schedules import Constant

# The plan of `small_inception` on three devices; pools are in the branches of the convolutions that follow them.
DEVICES = {
    "a": {"reduce": "CPU:0", "conv": "CPU:0", "direct": "CPU:1", "pool": "CPU:2", "pooled": "CPU:2"},
    "b": {"pool": "CPU:0", "pooled": "CPU:0", "direct": "CPU:1", "reduce": "CPU:2", "conv": "CPU:2"},
}
OF_CONVOLUTION = ("Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput")
OF_NORM = ("FusedBatchNormV3", "FusedBatchNormGradV3")
OF_RELU, OF_POOL = ("Relu", "ReluGrad"), ("MaxPool", "MaxPoolGrad")


def penalized_inception() -> keras.Model:
    """`small_inception` with a penalty on each kernel, computed outside of the layers."""
    model = small_inception()
    for variable in model.trainable_variables:
        if variable.name == "kernel":
            variable.regularizer = keras.regularizers.L2(0.01)
    return model


def inception_task(build=small_inception) -> TinyTask:
    """Nine examples: the last batch of an epoch has four."""
    return TinyTask(build=build, examples=images(9), batch_size=5)


def trained(name, task, devices, rule=None, steps: int = 20, precision: str = "float64", **of_mode):
    options = StepOptions(rule=rule or Momentum(momentum=0.9), schedule=Constant(0.05), precision=precision)
    strategy = build_strategy(name, task, devices, options, **of_mode)
    if steps:
        strategy.run_steps(steps)
    return strategy


@pytest.fixture(scope="module")
def step():
    """A strategy on three devices, and the graphs of a step."""
    with recorded_graphs() as graphs:
        strategy = trained("branches", inception_task(penalized_inception), cpus(3), steps=1, precision="float32")
    return strategy, graphs


def where(nodes, layer: str, kinds) -> dict[str, collections.Counter]:
    """For each kind of operation, how many of them the layer has on each device, its gradients included."""
    of_layer = re.compile(rf"/{layer}(_\d+)?/")
    found = {kind: collections.Counter() for kind in kinds}
    for node in nodes:
        # oneDNN's kernels have prefixes.
        kind = next((one for one in kinds if re.fullmatch(rf"(_\w*)?{one}", node.op)), None)
        if kind is not None and of_layer.search(node.name):
            found[kind][node.device.rpartition("device:")[2]] += 1
    return found


def test_each_branch_is_computed_on_its_device_forward_and_backward(step):
    _, graphs = step
    for block, homes in DEVICES.items():
        for part, device in homes.items():
            expected = {
                f"{block}_{part}": OF_CONVOLUTION,
                f"{block}_{part}_norm": OF_NORM,
                f"{block}_{part}_relu": OF_RELU,
            }
            for layer, kinds in {f"{block}_pool": OF_POOL}.items() if part == "pool" else expected.items():
                assert where(graphs.nodes, layer, kinds) == {kind: {device: 1} for kind in kinds}, layer


def test_parameters_are_updated_where_they_are_and_never_sent(step):
    strategy, graphs = step
    homes = collections.Counter(v.device.rpartition("device:")[2] for v in strategy.engine.parameters().values())
    assert min(homes[f"CPU:{index}"] for index in range(3)) > 5
    assert graphs.devices_of("ResourceApply") == homes
    for name, variable in strategy.engine.parameters().items():
        assert strategy.engine.slots()["momentum"][name].device == variable.device
    for source, target in ((1, 0), (1, 2), (2, 0), (2, 1)):
        assert graphs.copies(f"CPU:{source}", f"CPU:{target}") == {}
    # The first device has all moving statistics: it sends those of two norms to device 1, of three to device 2.
    assert sum(graphs.copies("CPU:0", "CPU:1").values()) == 2 * 2
    assert sum(graphs.copies("CPU:0", "CPU:2").values()) == 3 * 2


def test_the_first_lines_of_a_run_name_the_devices(step):
    strategy, _ = step
    assert strategy.notices[:3] == [
        "branches of 2 blocks on 3 devices, everything else on CPU:0; the fullest device of a "
        "block has 68% of its parameters on average",
        "joined by a_join: CPU:0 a_reduce; CPU:1 a_direct; CPU:2 a_pooled",
        "joined by b_join: CPU:0 b_pooled; CPU:1 b_direct; CPU:2 b_reduce",
    ]
    table = [line.split() for line in strategy.layout_table.splitlines()]
    assert ["b_join", "b_direct", "3", "CPU:1", "288"] in table
    assert strategy.mode_settings() == {"grid": "branch:3", "balance": "parameters"}


@pytest.mark.full
def test_dropout_and_penalties_are_those_of_one_device():
    rule, task = Adam(weight_decay=0.1), inception_task(penalized_inception)
    found = trained("branches", task, cpus(3), rule, branches=BranchOptions(balance="time"))
    expected = trained("towers", task, cpus(1), rule)
    assert_close(parameters_of(found), parameters_of(expected), tolerance=1e-9)
    assert found.evaluate() == pytest.approx(expected.evaluate())


def heads_of_shared_layers() -> keras.Model:
    """A mask that crosses devices, a recurrent layer, a model inside the model, a layer shared by two branches."""
    words = layers.Input((5,), dtype="int32", name="words")
    x = layers.Embedding(12, 6, mask_zero=True, name="table")(words)
    inputs = layers.Input((6,), name="given")
    inner = layers.Concatenate(name="join")(
        [layers.Dense(3, "gelu", name="left")(inputs), layers.Dense(3, name="right")(inputs)]
    )
    recurrent = [layers.GRU(6, name="slow")(x), layers.GlobalAveragePooling1D()(layers.Dense(6, name="mean")(x))]
    x = layers.Add(name="sum")(recurrent)
    x = keras.Model(inputs, inner, name="inner")(x)
    shared = layers.Dense(3, name="shared")
    both = layers.Add(name="both")([shared(x), layers.Dense(3, name="alone")(x), shared(layers.ReLU()(x))])
    return keras.Model(words, both)


@pytest.mark.full
def test_every_kind_of_model_graph():
    words = vectors(9)._replace(features=(vectors(9, 5).features * 100).astype("int32") % 12)
    task = TinyTask(build=heads_of_shared_layers, examples=words, batch_size=5)
    found, expected = trained("branches", task, cpus(2)), trained("towers", task, cpus(1))
    joins = [line.split()[0] for line in found.layout_table.splitlines()[1:]]
    assert list(dict.fromkeys(joins)) == ["sum", "both", "join"]
    assert_close(parameters_of(found), parameters_of(expected), tolerance=1e-9)


@pytest.mark.full
def test_a_run_goes_on_with_other_devices_and_in_other_modes(tmp_path):
    modes = [
        ("branches", cpus_in_groups("branch:2")),
        ("towers", cpus(1)),
        ("branches", cpus_in_groups("branch:3")),
    ]
    task = inception_task(functools.partial(small_inception, blocks=("a",)))
    undivided = trained("towers", task, cpus(1), Adam(), steps=6)
    for index, (name, devices) in enumerate(modes):
        strategy = trained(name, task, devices, Adam(), steps=0)
        checkpoints = Checkpoints(tmp_path, strategy)
        assert checkpoints.restore_latest() == (2 * index or None)
        strategy.restored()
        strategy.run_steps(2)
        checkpoints.prepare()
        checkpoints.save()
    assert_close(parameters_of(strategy), parameters_of(undivided), tolerance=1e-9)


@pytest.mark.parametrize(
    "devices, options, parts",
    [
        (cpus(1), {}, ("'branches' with 1 device a tower", "'towers'")),
        (cpus(4), {}, ("4 devices a tower", "3 branches")),
        (cpus(2), {"xla": True}, ("xla=True", "towers of several devices", "omit xla")),
        (dataclasses.replace(cpus(2), sharded=True), {}, ("parameter_device='sharded'", "'branches'")),
    ],
    ids=["one device", "four devices", "xla", "sharded"],
)
def test_what_it_refuses(devices, options, parts):
    with refused(*parts):
        build_strategy("branches", inception_task(), devices, StepOptions(**options))


def test_a_model_without_branches_is_refused():
    with refused("has no branches", "strategy='towers', or a ring without a grid"):
        branches_strategy(dense_task(), cpus(2), StepOptions())
    with refused("balance='5,3' with branches"):
        BranchOptions(balance="5,3")
