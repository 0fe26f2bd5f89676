"""Which parts each policy chooses, and models that have none."""

import keras
from keras import layers

from models.networks.registry import build_network
from models.networks.transformer import TransformerSize, transformer
from tests.towers.tiny_tasks import dense_network, stacked
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.recompute.recomputation import notices
from towers.recompute.segments import segments_of


def names(model, recompute):
    return [segment.name for segment in segments_of(model, recompute)]


def text_model():
    return transformer(TransformerSize(blocks=3, width=8, heads=2), num_tokens=5, length=4)


class OwnModel(keras.Model):
    """A model with a call of its own."""

    def __init__(self):
        super().__init__(name="own")
        self.hidden = [layers.Dense(4, name=f"hidden{index}") for index in range(2)]
        self.norm = layers.LayerNormalization(name="norm")

    def call(self, inputs):
        outputs = inputs
        for layer in self.hidden:
            outputs = layer(outputs)
        return self.norm(outputs)


def own_model():
    model = OwnModel()
    model(keras.ops.ones((1, 4)))
    return model


def test_blocks_of_a_residual_network():
    model = build_network("resnet20", image_shape=(32, 32, 3), num_classes=10)
    blocks = [f"stage{stage}_block{block}_conv1" for stage in (1, 2, 3) for block in (1, 2, 3)]
    assert names(model, "blocks") == blocks
    assert names(model, "full") == ["stem", *blocks]
    assert len(names(model, "sqrt")) == 4


def test_blocks_of_a_transformer():
    model = text_model()
    assert names(model, "blocks") == ["block_0", "block_1", "block_2"]
    assert names(model, "full") == ["token_embedding", "block_0", "block_1", "block_2", "final_norm"]


def test_a_part_within_a_block_is_named_with_the_block():
    inner = [name for name in names(text_model(), "sqrt") if name != "token_embedding"]
    assert inner and all(name.partition("/")[0].startswith("block_") and "/" in name for name in inner)


def test_a_block_of_a_chain_is_a_layer_with_a_kernel_and_what_follows():
    chain = []
    for index in range(3):
        chain += [layers.Conv2D(4, 3, name=f"conv{index}"), layers.BatchNormalization(), layers.ReLU()]
    found = segments_of(stacked((8, 8, 3), *chain, layers.Flatten(), layers.Dense(2)), "blocks")
    assert [(one.name, type(one.last).__name__) for one in found] == [
        ("conv0", "ReLU"),
        ("conv1", "ReLU"),
        ("conv2", "Flatten"),
    ]


def chain(num_frozen: int) -> keras.Model:
    """Five convolutions, of which the first ones are frozen."""
    convolutions = [layers.Conv2D(4, 3, padding="same", name=f"conv{index}") for index in range(5)]
    for layer in convolutions[:num_frozen]:
        layer.trainable = False
    return stacked((8, 8, 3), *convolutions, layers.Flatten(), layers.Dense(2, name="logits"))


def nested(num_frozen: int) -> keras.Model:
    """The chain of `chain` within a model."""
    inputs = layers.Input((8, 8, 3))
    return keras.Model(inputs, layers.Dense(3, name="head")(chain(num_frozen)(inputs)))


def test_frozen_layers_at_the_begin_are_no_part():
    for recompute in ("blocks", "full"):
        assert names(chain(0), recompute) == [f"conv{index}" for index in range(5)]
        assert names(chain(3), recompute) == ["conv3", "conv4"]
        assert names(nested(3), recompute)[:2] == ["conv3", "conv4"]
    for model in (chain(3), nested(3)):
        assert names(model, "sqrt") == ["conv3"]


def test_layers_without_weights_at_the_begin_are_in_the_first_part():
    model = stacked((8, 8, 3), layers.UpSampling2D(4), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(2))
    (found,) = segments_of(model, "full")
    assert type(found.first).__name__ == "UpSampling2D"


def test_a_model_with_only_its_last_part_trained_is_refused():
    for recompute in ("blocks", "full", "sqrt"):
        with refused(f"recompute={recompute!r}", "frozen layers", "computed once anyway", "recompute='none'"):
            segments_of(chain(5), recompute)


def test_an_inner_model_that_is_not_repeated_is_opened():
    inputs = layers.Input((4,), dtype="int32")
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(text_model()(inputs))))
    assert names(model, "blocks") == ["block_0", "block_1", "block_2"]


def test_layers_of_a_subclassed_model():
    model = own_model()
    assert names(model, "full") == ["hidden0", "hidden1", "norm"]
    assert names(model, "blocks") == ["hidden0", "hidden1"]
    with refused("recompute='sqrt'", "call() of its own", "recompute='blocks' or 'full'"):
        segments_of(model, "sqrt")


def test_a_model_without_parts_is_refused():
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2)], name="m")
    with refused("recompute='blocks'", "'m' repeats no block"):
        segments_of(model, "blocks")
    for recompute in ("full", "sqrt"):
        with refused(f"recompute={recompute!r}", "'m' is one part"):
            segments_of(model, recompute)
    with refused("recompute='full'", "xla=True"):
        StepOptions(recompute="full", xla=True)
    with refused("recompute='some'", "none, blocks, sqrt, full"):
        StepOptions(recompute="some")


def test_frozen_layers_after_the_trained_ones_are_no_parts():
    model = chain(0)
    for layer in model.layers[2:]:
        layer.trainable = False
    with refused("is one part, as nowhere a single tensor connects trained layers with trained layers after them"):
        segments_of(model, "full")


def test_the_notice_names_the_parts():
    (line,) = notices(text_model(), "full")
    assert "5 parts of the model again: token_embedding, block_0, ..., final_norm" in line
    assert notices(dense_network(), "none") == []
