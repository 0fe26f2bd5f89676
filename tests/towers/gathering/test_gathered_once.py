"""Parameters that towers gather when they need them: how many are alive, numbers, and that nothing runs twice."""

import collections

import keras
import pytest
from keras import layers

from models.data.drawn_text import DrawnText
from models.networks.transformer import TransformerSize
from models.text_task import TextTask
from strategies.registry import build_strategy
from strategies.synchronous import SynchronousStrategy
from tests.towers.gathering.gathered_bytes import peak_bytes
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, parameters_of, stacked, vectors
from tests.towers.user_errors import refused
from towers.gathering.gathered_once import GatheredGraph, GatheredOnce
from towers.one_process_engine import OneProcessEngine
from towers.options import StepOptions
from towers.updates.schedules import Constant

WIDTH, DEPTH = 32, 8


def chain() -> TinyTask:
    """Eight equal layers and a small one."""

    def build():
        equal = [layers.Dense(WIDTH, "tanh", name=f"dense_{index}") for index in range(DEPTH)]
        return stacked((WIDTH,), *equal, layers.Dense(NUM_CLASSES, name="logits"))

    return TinyTask(build=build, examples=vectors(8, WIDTH))


def unruly() -> TinyTask:
    """Uses besides a single call of a layer: penalties; a layer called twice; branches of different depth."""

    def build():
        inputs = layers.Input((WIDTH,))
        shared = layers.Dense(WIDTH, "tanh", name="shared", kernel_regularizer=keras.regularizers.L2(0.1))
        other = layers.Dense(WIDTH, "relu", name="other", bias_regularizer=keras.regularizers.L2(0.1))
        deep = shared(other(shared(inputs)))
        joined = layers.Concatenate()([deep, layers.Dense(5, name="side", kernel_regularizer="l1")(inputs)])
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(joined))

    return TinyTask(build=build, examples=vectors(8, WIDTH))


def recurrent() -> TinyTask:
    """A loop that reads six parameters, four of them too large to share a unit."""

    def build():
        cells = layers.RNN([layers.LSTMCell(8, name="first"), layers.LSTMCell(8, name="second")], name="cells")
        return stacked((WIDTH,), layers.Reshape((4, 8)), cells, layers.Dense(NUM_CLASSES, name="logits"))

    return TinyTask(build=build, examples=vectors(8, WIDTH))


def language() -> TextTask:
    """A transformer of two blocks whose table has more bytes than any other parameter."""
    return TextTask(
        text=DrawnText(num_tokens=200, length=8, num_train=16, num_eval=8),
        size=TransformerSize(blocks=2, width=32, heads=2),
        batch_size=8,
    )


def graph_of(task, num_owners: int = 2, **options) -> GatheredGraph:
    """The graph of a training tower."""
    made = []

    def traced(function, **named):
        made.append(GatheredOnce(function, **named))
        return made[-1]

    options = StepOptions(**options)

    def make_engine(model, spec):
        return OneProcessEngine(task, model, cpus(num_owners, zero=3), options, batch_spec=spec, traced=traced)

    strategy = SynchronousStrategy("towers", task, options, make_engine, num_owners)
    strategy.run_steps(1)
    (graph,) = made[0].graphs.values()
    return graph


@pytest.fixture(scope="module")
def chain_graph():
    return graph_of(chain())


@pytest.mark.full
def test_two_layers_of_a_chain_are_alive_at_most(chain_graph):
    graph = chain_graph
    layer, total = 4 * WIDTH * (WIDTH + 1), sum(graph.num_bytes)
    assert total > DEPTH * layer
    assert layer < peak_bytes(graph) <= 2.2 * layer
    assert peak_bytes(graph, waits=False) > 6 * layer, "or this test shows nothing"


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_parameters_of_a_transformer_are_alive_at_most(precision):
    graph = graph_of(language(), precision=precision)
    largest = max(graph.num_bytes)
    assert largest < sum(graph.num_bytes) / 4
    assert peak_bytes(graph) <= 3 * largest, "two, and a converted copy of one"
    assert peak_bytes(graph, waits=False) > 0.8 * sum(graph.num_bytes) * (0.5 if precision == "bfloat16" else 1)


def test_a_parameter_is_gathered_once_for_each_pass_and_nothing_is_computed_twice(chain_graph):
    graph = chain_graph
    gathers = collections.Counter(use.parameter for unit in graph.units for use in unit)
    kernels = range(0, 2 * DEPTH, 2)
    assert [gathers[kernel] for kernel in kernels] == [1] + [2] * (DEPTH - 1), (
        "the first layer's input has no gradient"
    )
    products = sum("MatMul" in node.op for node in graph.flat.graph_def.node)
    assert products == 3 * (DEPTH + 1) - 1, "forward, kernel's gradient, input's gradient"


TASKS = {"unruly": unruly, "recurrent": recurrent}


@pytest.mark.full
@pytest.mark.parametrize("name", TASKS)
def test_it_equals_one_device(name):
    found, expected = (
        build_strategy("towers", TASKS[name](), devices, StepOptions(schedule=Constant(0.1)))
        for devices in (cpus(3, zero=3), cpus(1))
    )
    reports = [strategy.run_steps(3) for strategy in (found, expected)]
    assert_close(parameters_of(found), parameters_of(expected))
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)


@pytest.mark.full
def test_unruly_uses_are_gathered_with_the_others():
    """The penalty of a weight, and its gradient, are computed when the weight is there for its layer."""
    graph = graph_of(unruly())
    units_of_parameter = collections.Counter(
        parameter for unit in graph.units for parameter in {use.parameter for use in unit}
    )
    assert max(units_of_parameter.values()) <= 4, "the shared layer is used twice in each pass"
    assert peak_bytes(graph) <= 2.5 * max(graph.num_bytes)


def test_xla_is_refused_in_one_line():
    with refused("zero=3 with xla=True"):
        build_strategy("towers", chain(), cpus(2, zero=3), StepOptions(xla=True))
