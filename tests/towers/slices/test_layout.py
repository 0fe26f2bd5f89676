"""Which layers are split, and how; what is refused; the table for the user."""

import keras
import pytest
from keras import layers

from models.networks.transformer import TRANSFORMERS, transformer
from tests.towers.tiny_tasks import stacked
from tests.towers.user_errors import refused
from towers.slices.layout import Layout
from towers.slices.layout_report import large_whole_notices, layout_table
from towers.tower import ModelVariables

DEVICES = ("/device:CPU:0", "/device:CPU:1")


def small_transformer() -> keras.Model:
    return transformer(TRANSFORMERS["transformer_tiny"], num_tokens=10, length=6)


def splits(model, num_slices=2, table=()) -> dict[str, str]:
    return {found.path: found.split for found in Layout(model, num_slices, table).layers}


def test_defaults_of_the_transformer():
    layout = Layout(small_transformer(), 2)
    found = {split.path: split.split for split in layout.layers}
    assert found["token_embedding"] == found["position_embedding"] == "vocabulary"
    block = {path.partition("/")[2]: split for path, split in found.items() if path.startswith("block_1/")}
    assert block == {
        "attention_norm": "whole",
        "attention": "heads",
        "mlp_norm": "whole",
        "mlp_up": "columns",
        "mlp_down": "rows",
    }
    up = next(split for split in layout.layers if split.path == "block_1/mlp_up")
    assert layout.reader_of_parts(up).path == "block_1/mlp_down"


def test_every_second_dense_and_convolution_reads_the_parts_of_the_one_before():
    dense = [
        layers.Dense(6, "relu", name="a"),
        layers.ReLU(),
        layers.Dense(6, name="b"),
        layers.Dense(6, name="c"),
    ]
    assert splits(stacked((4,), *dense)) == {"a": "columns", "b": "rows", "c": "columns"}
    # A softmax and a dropout need their whole inputs.
    others = [layers.Dense(6, "softmax", name="a"), layers.Dense(6, name="b"), layers.Dropout(0.1)]
    assert set(splits(stacked((4,), *others, layers.Dense(4, name="c"))).values()) == {"columns"}
    images = [layers.Conv2D(4, 3, name="a"), layers.ReLU(), layers.Conv2D(4, 3, name="b"), layers.Flatten()]
    found = splits(stacked((8, 8, 3), *images, layers.Dense(3, name="c")))
    assert found == {"a": "output_channels", "b": "input_channels", "c": "columns"}


def test_uneven_slices_and_their_shards():
    layout = Layout(stacked((4,), layers.Dense(8, name="a")), 3)
    assert layout.layers[0].lengths == (3, 3, 2)
    shards = [(shard.name, shard.owner, shard.dimension, shard.begin, shard.end) for shard in layout.shards()]
    assert shards == [
        *(("a/kernel", owner, 1, begin, end) for owner, begin, end in ((0, 0, 3), (1, 3, 6), (2, 6, 8))),
        *(("a/bias", owner, 0, begin, end) for owner, begin, end in ((0, 0, 3), (1, 3, 6), (2, 6, 8))),
    ]


def test_the_first_pattern_that_fits_counts_and_the_next_layer_follows_it():
    model = stacked((4,), *(layers.Dense(6, name=name) for name in ("a1", "a2", "b")))
    assert splits(model, table=[("a1", "rows"), ("a*", "whole")]) == {"a1": "rows", "a2": "whole", "b": "columns"}


def test_layers_of_two_models_inside_the_model_that_have_the_same_path():
    def encoder(name):
        inputs = keras.Input((4,))
        outputs = layers.Dense(4, name="down")(layers.Dense(8, "relu", name="up")(inputs))
        attended = layers.MultiHeadAttention(2, 2, name="attention")(*[layers.Reshape((1, 4))(outputs)] * 2)
        return keras.Model(inputs, layers.Flatten()(attended), name=name)

    query, document = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([query, document], layers.Dot(1)([encoder("a")(query), encoder("b")(document)]))
    found = {"up": "columns", "down": "rows", "attention": "heads"}
    assert splits(model) == found | {f"{path}#2": split for path, split in found.items()}
    assert splits(model, table=[("up#2", "whole")])["up#2"] == "whole"
    layout = Layout(model, 2)
    held = [layout.bytes_of(index)[1] for index in range(len(layout.names))]
    assert held[: len(held) // 2] == held[len(held) // 2 :]


@pytest.mark.parametrize(
    "table, parts",
    [
        ([("c*", "rows")], ("layout='c*=rows'", "fits no layer", "a, norm")),
        ([("a", "heads")], ("layout='a=heads'", "layer 'a'", "by columns or rows")),
        ([("norm", "rows")], ("layout='norm=rows'", "no rule splits LayerNormalization", "use whole")),
        ([("a", "diagonals")], ("layout='a=diagonals'", "unknown split", "columns, rows")),
        ([("a", "columns")], ("layout='a=columns'", "6 columns, fewer than 7 slices", "a=whole")),
    ],
)
def test_a_table_that_does_not_fit(table, parts):
    model = stacked((4,), layers.Dense(6, name="a"), layers.LayerNormalization(name="norm"))
    with refused(*parts):
        Layout(model, 7, table)


def test_what_stays_whole_and_why():
    wide = layers.EinsumDense("ab,bc->ac", 50, name="einsum")
    bound = layers.Dense(50, kernel_constraint="non_neg", name="bound")
    frozen = layers.Dense(50, trainable=False, name="frozen")
    model = stacked((50,), layers.Dense(50, name="split"), wide, bound, frozen, layers.Dense(1, name="narrow"))
    layout = Layout(model, 2)
    reasons = {found.path: found.reason for found in layout.layers if found.split == "whole"}
    assert reasons == {
        "einsum": "no rule splits EinsumDense",
        "bound": "its constraint needs the whole",
        "frozen": "it is not trained",
        "narrow": "1 columns, fewer than 2 slices",
    }
    assert large_whole_notices(layout) == [
        "not sliced: einsum/kernel, 10,000 bytes on the first device (no rule splits EinsumDense)",
        "not sliced: bound/kernel, 10,000 bytes on the first device (its constraint needs the whole)",
    ]


def test_the_table_for_the_user():
    model = small_transformer()
    lines = {
        line.split()[0]: " ".join(line.split()[1:]) for line in layout_table(Layout(model, 2), DEVICES).split("\n")
    }
    down = "block_0/mlp_down"
    assert (
        lines["block_0/mlp_up/kernel"]
        == f"32 x 128 columns 64 64 of dimension 1 8,192 8,192 none: {down} reads the parts"
    )
    assert lines[f"{down}/kernel"] == "128 x 32 rows 64 64 of dimension 0 8,192 8,192 all-reduce"
    assert lines[f"{down}/bias"] == "32 whole all on the first 128 0 rows leave it whole"
    assert lines["block_0/attention/query/kernel"] == "32 x 2 x 16 heads 1 1 of dimension 1 2,048 2,048 all-reduce"
    held = [int(number.replace(",", "")) for number in lines["in"].split()[-2:]]
    assert sum(held) == 4 * sum(variable.value.numpy().size for variable in ModelVariables.of(model).parameters)
