"""Models cut into stages."""

import keras
import pytest
from keras import layers

from models.networks.transformer import TransformerSize, transformer
from tests.towers.user_errors import refused
from towers.errors import UserError
from towers.layers.kernels import DEFAULT_KERNELS
from towers.stages import options as options_module
from towers.stages.model_stages import cut_by_parameters, cut_by_sizes, nodes_of, parameter_bytes
from towers.stages.operation_seconds import operation_seconds
from towers.stages.options import PipelineOptions, check_microbatches
from towers.stages.staged_trace import readings_of
from towers.tower import ModelVariables


def names_of(stages):
    return [[node.operation.name for node in nodes] for nodes in stages.nodes]


def test_stages_have_about_equally_many_parameters():
    model = keras.Sequential([layers.Input((4,)), *(layers.Dense(4, name=f"dense{index}") for index in range(5))])
    assert names_of(cut_by_parameters(model, 2)) in (
        [["dense0", "dense1", "dense2"], ["dense3", "dense4"]],
        [["dense0", "dense1"], ["dense2", "dense3", "dense4"]],
    )
    assert names_of(cut_by_sizes(model, (1, 4)))[0] == ["dense0"]


def test_stages_take_equally_long(monkeypatch):
    """Of four layers of equal size the first takes as long as the others together."""
    asked = []

    def seconds(functional, num_examples, kernels):
        asked.append(num_examples)
        return [3.0, 1.0, 1.0, 1.0]

    monkeypatch.setattr(options_module, "operation_seconds", seconds)
    model = keras.Sequential([layers.Input((4,)), *(layers.Dense(4, name=f"dense{index}") for index in range(4))])
    stages = PipelineOptions(balance="time").stages_of(model, 2, num_examples=5)
    assert names_of(stages) == [["dense0"], ["dense1", "dense2", "dense3"]]
    assert names_of(PipelineOptions().stages_of(model, 2)) == [["dense0", "dense1"], ["dense2", "dense3"]]
    assert asked == [5]


def test_an_operation_with_more_to_compute_takes_longer():
    """The convolution has a hundredth of the parameters and makes 60 times the products."""
    images = layers.Input((64, 64, 3))
    pooled = layers.GlobalMaxPooling2D()(layers.Conv2D(32, 5, name="long")(images))
    model = keras.Model(images, layers.Dense(8000, name="short")(pooled))
    named = zip(nodes_of(model), operation_seconds(model, 8, DEFAULT_KERNELS), strict=True)
    seconds = {node.operation.name: taken for node, taken in named}
    assert seconds["long"] > 2 * seconds["short"] > 0


@pytest.mark.parametrize("num_oov_indices", [1, 0])
def test_an_operation_of_text_is_measured_on_text(num_oov_indices):
    words = layers.Input((1,), dtype="string")
    lookup = layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=num_oov_indices, name="lookup")
    model = keras.Model(words, layers.Embedding(4, 3)(lookup(words)))
    if num_oov_indices:
        assert min(operation_seconds(model, 8, DEFAULT_KERNELS)) > 0
        return
    with refused("balance='time': operation 'lookup' fails on the random values", "use balance='parameters'"):
        operation_seconds(model, 8, DEFAULT_KERNELS)


def test_a_tied_table_lives_in_the_first_stage_that_reads_it():
    model = transformer(TransformerSize(blocks=2, width=8, heads=2), num_tokens=50, length=4)
    stages = cut_by_parameters(model, 2)
    table = next(v for v in model.trainable_variables if v.shape == (50, 8))
    assert stages.stages_of(table) == [0, 1]
    readings = readings_of(stages, ModelVariables.of(model))
    assert len(readings) == len(model.trainable_variables) + 1
    assert sum(parameter_bytes(stages)) == 4 * model.count_params()


class OwnCall(keras.Model):
    def call(self, inputs):
        return inputs


def test_a_model_with_its_own_call_is_refused():
    inputs = keras.Input((3,))
    for model in (OwnCall(name="own"), OwnCall(inputs, layers.Dense(2)(inputs), name="own")):
        with refused("model 'own' of class OwnCall can't be cut into stages"):
            cut_by_parameters(model, 2)


@pytest.mark.parametrize(
    "options, model_stages, message",
    [
        ({"balance": (1, 1)}, 3, "balance=1,1: 2 numbers for 3 stages"),
        ({"balance": (1, 1)}, 2, "balance=1,1: the sizes add up to 2, the model has 3 operations"),
        ({}, 4, "4 stages for 3 operations"),
    ],
    ids=str,
)
def test_stages_that_do_not_fit(options, model_stages, message):
    model = keras.Sequential([layers.Input((4,)), *(layers.Dense(4) for _ in range(3))])
    with refused(message):
        PipelineOptions(**options).stages_of(model, model_stages)


def test_options_that_are_wrong():
    with refused("balance='evenly' is unknown"):
        PipelineOptions(balance="evenly")
    with refused("microbatches=0: it must be at least 1"):
        PipelineOptions(microbatches=0)
    with refused("stages='2': must be an integer", "stages=4"):
        PipelineOptions(stages="2")
    with refused("balance=5 is unknown", "a number of operations for each stage"):
        PipelineOptions(balance=5)
    with refused("balance=(3.0, 1.0) is unknown"):
        PipelineOptions(balance=(3.0, 1.0))
    with refused("schedule=None: must be one of", "schedule='1f1b'"):
        PipelineOptions(schedule=None)
    with refused("schedule=gpipe with 4 stages on 2 devices"):
        PipelineOptions(stages=4, schedule="gpipe").schedule_for(2)
    with refused(
        "schedule=interleaved with 2 stages on 2 devices", "use stages=4 with grid='stage:2', or schedule=1f1b"
    ):
        PipelineOptions(schedule="interleaved").schedule_for(2)
    with refused("microbatches=3: the given schedule has 4 microbatches; omit microbatches"):
        PipelineOptions(microbatches=3, schedule=PipelineOptions(microbatches=4).schedule_for(2)).schedule_for(2)
    with refused("the given schedule is for 2 devices, and a tower has 3: give the grid stage:2"):
        PipelineOptions(schedule=PipelineOptions().schedule_for(2)).schedule_for(3)
    with pytest.raises(UserError, match="schedule=1f1b with 2 stages on 3 devices: .* use stages=3$"):
        PipelineOptions(stages=2).schedule_for(3)


def test_every_tower_needs_an_example_of_each_microbatch():
    check_microbatches(16, 2, 4, (1.0, 1.0))
    with refused("microbatches=5, num_towers=2 and a microbatch (accumulation=2) of 8"):
        check_microbatches(16, 2, 5, (1.0, 1.0))
    with refused(
        "microbatches=20 (by default, twice the stages), num_towers=1 and a batch of 16", "microbatches=16"
    ):
        check_microbatches(16, 1, 20, (1.0,), by_default=True)
    # Each microbatch needs four examples: with two or three the first tower gets all of them.
    with refused("microbatches=5, num_towers=2 and a batch of 10", "use microbatches=2 or less"):
        check_microbatches(10, 1, 5, (3.0, 1.0))
    with refused("microbatches=5, 2 towers in all processes and a batch of 10", "use microbatches=2 or less"):
        check_microbatches(10, 1, 5, (3.0, 1.0), num_own=1)
    check_microbatches(10, 1, 2, (3.0, 1.0))
    with refused("an example of each microbatch; use a larger batch"):
        check_microbatches(10, 1, 5, (99.0, 1.0))
