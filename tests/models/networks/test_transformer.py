"""The transformer: its sizes and paths, what each logit depends on, and its tied table."""

import fnmatch

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.networks import transformer as module
from models.networks.transformer import TRANSFORMERS, TransformerSize, transformer
from tests.models.networks.counts import count_parameters
from tests.tiers import first_quick
from towers.errors import UserError
from towers.precision import layer_precision

SMALL = TransformerSize(blocks=2, width=8, heads=2)
LENGTH, NUM_TOKENS = 6, 11
PATHS_OF_A_BLOCK = (
    "attention_norm/gamma",
    "attention_norm/beta",
    "attention/query/kernel",
    "attention/key/kernel",
    "attention/value/kernel",
    "attention/attention_output/kernel",
    "mlp_norm/gamma",
    "mlp_norm/beta",
    "mlp_up/kernel",
    "mlp_up/bias",
    "mlp_down/kernel",
    "mlp_down/bias",
)


def small(precision="float32", **options):
    keras.utils.set_random_seed(3)
    with layer_precision(precision):
        return transformer(SMALL, num_tokens=NUM_TOKENS, length=LENGTH, **options)


@pytest.fixture(scope="module")
def built():
    """A model that no test changes."""
    return small()


def draw_tokens(count=3):
    return np.random.default_rng(count).integers(0, NUM_TOKENS, (count, LENGTH)).astype(np.int32)


def num_parameters(size: TransformerSize, num_tokens: int, length: int) -> int:
    """The formula in the module's docstring."""
    of_block = 12 * size.width**2 + 9 * size.width
    return (num_tokens + length) * size.width + size.blocks * of_block + 2 * size.width


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_docstring_states_the_sizes(name):
    size = TRANSFORMERS[name]
    line = next(line for line in module.__doc__.splitlines() if line.split()[:1] == [name])
    expected = f"{size.blocks} blocks of width {size.width}, {size.heads} heads"
    assert " ".join(line.split()[1:]) == f"{expected} {num_parameters(size, 32, 64):,} parameters"


def test_the_number_of_parameters_is_that_of_the_formula(built):
    assert count_parameters(built) == num_parameters(SMALL, NUM_TOKENS, LENGTH)


def test_paths_name_block_part_and_weight(built):
    of_blocks = [f"block_{index}/{path}" for index in range(2) for path in PATHS_OF_A_BLOCK]
    ends = ["token_embedding/embeddings", "position_embedding/embeddings", "final_norm/gamma", "final_norm/beta"]
    paths = [variable.path for variable in built.trainable_variables]
    assert paths == [*ends[:2], *of_blocks, *ends[2:]]
    assert len(fnmatch.filter(paths, "block_*/attention/query/kernel")) == 2


def test_another_build_with_the_same_seed_has_the_same_paths_and_weights(built):
    for one, other in zip(built.trainable_variables, small().trainable_variables, strict=True):
        assert one.path == other.path
        np.testing.assert_array_equal(one, other, err_msg=one.path)


def test_kernels_of_one_shape_are_drawn_apart(built):
    kernels = [variable.numpy() for variable in built.trainable_variables if "kernel" in variable.path]
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels) == 12


def test_the_graph_between_blocks_is_a_chain_of_stock_layers(built):
    """So the model can be cut there: one tensor crosses a cut, besides the table that both ends use."""
    model = built
    block_0, block_1 = model.get_layer("block_0"), model.get_layer("block_1")
    assert block_1.input.shape == block_0.output.shape == (None, LENGTH, 8)
    (node,) = [node for node in block_1._inbound_nodes if node.arguments.keras_tensors[0].shape[0] is None][-1:]
    (given,) = node.arguments.keras_tensors
    assert given._keras_history.operation is block_0
    for part in (model, block_0, block_1):
        for operation in part._operations:
            assert type(operation).__module__.startswith("keras."), operation


@pytest.mark.parametrize("precision", first_quick(["bfloat16", "float32", "float64"]))
def test_a_later_token_changes_no_earlier_logits(precision):
    model, tokens = small(precision), draw_tokens()
    changed = tokens.copy()
    changed[:, 4] = (changed[:, 4] + 1) % NUM_TOKENS
    before, after = model(tokens).numpy(), model(changed).numpy()
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_a_logit_depends_on_every_token_before_it(built):
    (tokens,) = draw_tokens(1)
    changed = np.where(np.eye(LENGTH, dtype=bool), (tokens + 1) % NUM_TOKENS, tokens)  # text i at position i
    logits = built(np.stack([tokens, *changed])).numpy()[:, -1]
    assert (logits[1:] != logits[0]).any(-1).all()


@pytest.mark.parametrize(("precision", "dtype"), first_quick([("bfloat16", tf.float32), ("float64", tf.float64)]))
def test_logits_are_float32_or_wider_and_blocks_compute_in_the_given_precision(precision, dtype):
    model = small(precision)
    assert model(draw_tokens()).dtype == model.output.dtype == dtype
    for name in ("block_0", "block_1"):
        block = model.get_layer(name)
        assert {tensor.dtype for layer in block.layers for tensor in (layer.output,)} == {precision}


def test_the_tied_tables_gradient_is_the_sum_of_both_uses():
    model, tokens = small("float64"), draw_tokens()
    table = model.get_layer("token_embedding").embeddings
    hidden_of = keras.Model(model.input, model.get_layer("final_norm").output)
    upstream = np.random.default_rng(1).normal(size=(3, LENGTH, NUM_TOKENS))

    def gradient(logits_of):
        with tf.GradientTape() as tape:
            objective = tf.reduce_sum(logits_of() * upstream)
        return tf.convert_to_tensor(tape.gradient(objective, table.value)).numpy()

    both = gradient(lambda: model(tokens))
    of_lookup = gradient(
        lambda: tf.matmul(hidden_of(tokens), tf.stop_gradient(table.value)[None], transpose_b=True)
    )
    of_logits = gradient(
        lambda: tf.matmul(tf.stop_gradient(hidden_of(tokens)), table.value[None], transpose_b=True)
    )
    assert np.abs(of_lookup).max() > 0.1 and np.abs(of_logits).max() > 0.1
    np.testing.assert_allclose(both, of_lookup + of_logits, rtol=1e-12)


def test_dropout_acts_in_training_alone(built):
    plain, dropping, tokens = built, small(dropout=0.5), draw_tokens()
    for one, other in zip(plain.trainable_variables, dropping.trainable_variables, strict=True):
        assert one.path == other.path
        other.assign(one)
    np.testing.assert_array_equal(dropping(tokens), plain(tokens))
    assert (dropping(tokens, training=True).numpy() != plain(tokens).numpy()).any()


def test_a_saved_network_has_the_same_outputs(tmp_path):
    model, tokens = small(dropout=0.1), draw_tokens()
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(tokens), model(tokens))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 10, "heads": 4}, "width=10, heads=4: .* multiple .* width=12"),
        ({"blocks": 0}, "blocks=0: must be at least 1"),
    ],
)
def test_wrong_sizes_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        TransformerSize(**{"blocks": 1, "width": 8, "heads": 2} | sizes)
