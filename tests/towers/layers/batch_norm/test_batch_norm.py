"""Batch norm in a tower: the numbers of Keras's own layer, without and with an exchange over the towers."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from tests.towers.tiny_tasks import stacked
from tests.towers.user_errors import refused
from towers import batch_stats
from towers.exchange import TowerExchange
from towers.layers.batch_norm import compiled
from towers.layers.batch_norm.calls import batch_norm_layers, num_fused
from towers.layers.kernels import LayerKernels
from towers.tower import run_model

IMAGE = (6, 5, 4, 3)
SHAPES = {"vectors": (7, 3), "sequences": (6, 4, 3), "images": IMAGE}
TOLERANCE = 1e-6
FUSED, KERAS = LayerKernels(), LayerKernels(fused_batch_norm=False)
COMPILED = LayerKernels(fused_batch_norm=False, compiled_batch_norm=True)
every_kernel = pytest.mark.parametrize("kernels", [FUSED, COMPILED], ids=["fused", "compiled"])


@pytest.fixture(autouse=True)
def also_for_few_elements(request, monkeypatch):
    """Compiles layers of few elements too, because the tests' arrays are small."""
    if "few_elements" not in request.node.name:
        monkeypatch.setattr(compiled, "FEWEST_ELEMENTS", 1)
        monkeypatch.setattr(compiled, "FEWEST_BESIDE_FUSED", 1)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Results of a pass of sum(outputs * upstream), as arrays; parameters and state in the layer's order."""

    outputs: np.ndarray
    inputs_gradient: np.ndarray
    gradients: list[np.ndarray]
    state: list[np.ndarray]


def layer_model(shape, **options) -> keras.Model:
    """A model of one batch norm with random variables between 0.5 and 1.5."""
    model = stacked(shape[1:], layers.BatchNormalization(**options))
    draw = np.random.default_rng(8)
    for variable in model.variables:
        variable.assign(draw.uniform(0.5, 1.5, variable.shape))
    return model


def drawn(shape, mean=2.0) -> tf.Tensor:
    """Random inputs whose mean is not 0, as of real ones."""
    return tf.constant(np.random.default_rng(1).normal(mean, 3.0, shape), tf.float32)


def upstream_of(inputs) -> tf.Tensor:
    """Gradients correlated with the inputs, so that gamma's gradient is no small difference of large sums."""
    return tf.constant(np.random.default_rng(2).normal(size=inputs.shape) + 0.5 * inputs, tf.float32)


class _Features(tuple):
    """A stand-in for a batch with the only attribute that `run_model` reads."""

    features = property(lambda self: self[0])


def model_pass(model, inputs, upstream, *, training=True, kernels=FUSED, exchange=None, weight=None):
    """(outputs, gradient of inputs, gradients, new state) as tensors, through the tower's own `run_model`."""
    parameters = [tf.convert_to_tensor(variable) for variable in model.trainable_variables]
    state = [tf.convert_to_tensor(variable) for variable in model.non_trainable_variables]
    mapping = [*zip(model.trainable_variables, parameters, strict=True)]
    mapping += zip(model.non_trainable_variables, state, strict=True)
    with tf.GradientTape() as tape:
        tape.watch([inputs, *parameters])
        batch = _Features([inputs])
        outputs, _, new_state = run_model(
            model,
            mapping,
            model.non_trainable_variables,
            batch,
            training,
            kernels,
            exchange,
            weight,
        )
        objective = tf.reduce_sum(tf.cast(outputs, upstream.dtype) * upstream)
    of_inputs, of_parameters = tape.gradient(objective, (inputs, parameters))
    return outputs, of_inputs, of_parameters, batch_stats.after(state, new_state)


def as_pass(tensors) -> Pass:
    return Pass(*tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float32).numpy(), tensors))


def assert_same(found: Pass, expected: Pass, tolerance=TOLERANCE):
    """Asserts that each array differs by at most `tolerance` times its largest number."""
    arrays = (tf.nest.flatten(dataclasses.astuple(one)) for one in (found, expected))
    for ours, theirs in zip(*arrays, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def by_keras(model, inputs, upstream, *, training=True) -> Pass:
    """The stock layer, in float64: in float32 its gradients lose more digits than are compared here."""
    exact = keras.models.clone_model(model, clone_function=_in_float64)
    for variable, value in zip(exact.variables, model.variables, strict=True):
        variable.assign(value)
    inputs, upstream = tf.cast(inputs, tf.float64), tf.cast(upstream, tf.float64)
    return as_pass(model_pass(exact, inputs, upstream, training=training, kernels=KERAS))


def _in_float64(layer):
    return type(layer).from_config({**layer.get_config(), "dtype": "float64"})


def both(model, inputs, **options) -> tuple[Pass, Pass]:
    """The pass that the tower computes, and Keras's own."""
    upstream = upstream_of(inputs)
    found = as_pass(model_pass(model, inputs, upstream, **options))
    return found, by_keras(model, inputs, upstream, training=options.get("training", True))


OPTIONS = {
    "default": {},
    "no_scale": {"scale": False},
    "no_center": {"center": False},
    "neither": {"scale": False, "center": False},
    "momentum_and_epsilon": {"momentum": 0.5, "epsilon": 0.1},
    "small_epsilon": {"epsilon": 1e-6},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
# The compiled loops see rows of channels, whatever the shape; the fused kernel gets each shape as images.
shapes_of_kernels = pytest.mark.parametrize(
    "shape, kernels",
    [
        pytest.param(
            SHAPES[shape],
            kernels,
            id=f"{name}-{shape}",
            marks=[] if (name, shape) in (("fused", "images"), ("compiled", "vectors")) else [pytest.mark.full],
        )
        for name, kernels in (("fused", FUSED), ("compiled", COMPILED))
        for shape in SHAPES
    ],
)
# Vectors and images with each set of options, sequences with the default ones.
SHAPES_AND_OPTIONS = [
    pytest.param(
        SHAPES[shape],
        OPTIONS[options],
        id=f"{shape}-{options}",
        marks=[pytest.mark.full] if shape == "sequences" or (shape, options) == ("images", "default") else [],
    )
    for shape in SHAPES
    for options in OPTIONS
    if shape != "sequences" or options == "default"
]


@pytest.mark.parametrize("shape, options", SHAPES_AND_OPTIONS)
@every_kernel
@pytest.mark.parametrize("training", first_quick([True, False]))
def test_as_keras(shape, options, training, kernels):
    model = layer_model(shape, **options)
    found, expected = both(model, drawn(shape), training=training, kernels=kernels)
    assert_same(found, expected)
    moved = any(np.any(a != v.numpy()) for a, v in zip(found.state, model.non_trainable_variables, strict=True))
    assert moved == training


@every_kernel
@pytest.mark.parametrize("exchange", [None, TowerExchange(1)], ids=["alone", "synced"])
@pytest.mark.parametrize(
    "given, options",
    [
        ("uint8", {}),
        ("float32", {"dtype": "mixed_bfloat16", "autocast": False}),
        ("bfloat16", {"autocast": False}),
    ],
    ids=["integers", "float32 in bfloat16", "bfloat16 in float32"],
)
def test_inputs_of_another_type_than_the_outputs(given, options, kernels, exchange):
    inputs = layers.Input(IMAGE[1:], dtype=given)
    model = keras.Model(inputs, layers.BatchNormalization(**options)(inputs))
    pixels = tf.cast(np.random.default_rng(1).integers(0, 256, IMAGE), given)
    mapping = [(variable, tf.convert_to_tensor(variable)) for variable in model.variables]
    state = model.non_trainable_variables
    passed = functools.partial(run_model, model, mapping, state, _Features([pixels]), True)
    found, expected = passed(kernels, exchange, tf.constant(1.0)), passed(KERAS)
    for ours, theirs in zip([found[0], *found[2].values()], [expected[0], *expected[2].values()], strict=True):
        assert ours.dtype == theirs.dtype
        # Both compute in float32; a number between two of 16 bits may be rounded to either.
        rounding = 2**-8 if ours.dtype == tf.bfloat16 else 1e-5
        np.testing.assert_allclose(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32), rounding, 1e-5)


@every_kernel
def test_a_layer_with_weights_in_16_bits_keeps_keras_operations(kernels):
    model = stacked(IMAGE[1:], layers.BatchNormalization(dtype="bfloat16"))
    inputs = tf.cast(drawn(IMAGE), tf.bfloat16)
    upstream = tf.ones(IMAGE, tf.bfloat16)
    found = as_pass(model_pass(model, inputs, upstream, kernels=kernels))
    assert_same(found, as_pass(model_pass(model, inputs, upstream, kernels=KERAS)))


@pytest.mark.parametrize("shape, axis", [(IMAGE, 1), (IMAGE, 2), (SHAPES["sequences"], 1), (IMAGE, 3)])
def test_as_keras_with_another_axis(shape, axis):
    assert_same(*both(layer_model(shape, axis=axis), drawn(shape)))


@every_shape
@every_kernel
def test_a_frozen_layer_uses_its_moving_statistics(shape, kernels):
    model = layer_model(shape)
    model.layers[-1].trainable = False
    before = [variable.numpy() for variable in model.variables]
    found, expected = both(model, drawn(shape), kernels=kernels)
    assert_same(found, expected)
    assert found.gradients == [] and len(found.state) == 4
    for value, old in zip(found.state, before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.full
@pytest.mark.parametrize(
    "shape, precision, tolerance",
    [
        (SHAPES["vectors"], "bfloat16", 0.02),
        (SHAPES["sequences"], "float16", 0.002),
        (IMAGE, "bfloat16", 0.02),
        (IMAGE, "float16", 0.002),
    ],
)
@every_kernel
@pytest.mark.parametrize("training", [True, False])
def test_short_numbers_are_near(shape, training, kernels, precision, tolerance):
    """Statistics are float32 in both precisions; outputs have 8 or 11 bits."""
    model = layer_model(shape, dtype=f"mixed_{precision}")
    found, expected = both(model, drawn(shape), training=training, kernels=kernels)
    with kernels.in_place(model):
        assert model(drawn(shape), training=training).dtype == precision
    assert_same(found, expected, tolerance=tolerance)


def test_float64_keeps_its_digits():
    model = layer_model(SHAPES["vectors"], dtype="float64")
    inputs = tf.cast(drawn(SHAPES["vectors"]), tf.float64)
    with LayerKernels().in_place(model):
        ours = model(inputs, training=True)
    np.testing.assert_array_equal(ours, layer_model(SHAPES["vectors"], dtype="float64")(inputs, training=True))


@every_kernel
@pytest.mark.parametrize("shape", first_quick([((1, 3),), ((1, 1, 3),)]))
def test_one_example_has_a_variance_of_zero(shape, kernels):
    """The correction of the kernel's factor n / (n - 1) does not divide by zero."""
    found, expected = both(layer_model(shape), drawn(shape), kernels=kernels)
    assert all(np.isfinite(value).all() for value in found.state)
    np.testing.assert_allclose(found.state, expected.state, rtol=1e-6)


@every_kernel
def test_a_masked_input_keeps_keras_arithmetic(kernels):
    model = stacked((4, 3), layers.Masking(), layers.BatchNormalization())
    inputs = tf.concat([drawn((6, 3, 3)), tf.zeros([6, 1, 3])], 1)
    found, expected = (
        as_pass(model_pass(model, inputs, upstream_of(inputs), kernels=one)) for one in (kernels, KERAS)
    )
    assert_same(found, expected, tolerance=0)


# --- compiled loops


def has_compiled_loops(function) -> bool:
    library = function.get_concrete_function().graph.as_graph_def().library.function
    return any(found.attr["_XlaMustCompile"].b for found in library)


@pytest.mark.parametrize("exchange", [None, TowerExchange(1)], ids=["alone", "synced"])
def test_where_the_fused_kernel_is_fast_only_exchanged_statistics_are_compiled(exchange):
    model, inputs = layer_model(IMAGE), drawn(IMAGE)
    upstream, kernels = upstream_of(inputs), LayerKernels(compiled_batch_norm=True)

    @tf.function(autograph=False)
    def step():
        return model_pass(model, inputs, upstream, kernels=kernels, exchange=exchange)

    assert has_compiled_loops(step) == (exchange is not None)


@pytest.mark.parametrize(
    "shape, dtype, is_faster",
    [
        ((8, 8, 64), "float32", True),
        ((3, 3, 256), "float32", False),
        ((3, 3, 256), "bfloat16", False),
        ((8, 8, 24), "float32", True),
        ((8, 8, 8), "float32", False),
        ((8, 8, 8), "bfloat16", True),
    ],
)
def test_few_elements_stay_on_the_fused_kernel_unless_it_is_slow(shape, dtype, is_faster):
    assert compiled.beats_fused((None, *shape), dtype) == is_faster
    policy = dtype if dtype == "float32" else f"mixed_{dtype}"
    model = stacked(shape, layers.BatchNormalization(dtype=policy))
    (notice,) = LayerKernels(compiled_batch_norm=True).notices(model, exchanges=True)
    assert ("compiled" in notice) == is_faster


@pytest.mark.parametrize(
    "shape, options, is_compiled",
    [
        ((4, 8, 16), {}, True),
        ((4, 8, 15), {}, False),
        ((1024,), {}, False),
        ((None, 1024), {}, False),
        ((1024, 1), {"axis": 1}, False),
        ((4, 8, 16), {"dtype": "mixed_bfloat16"}, True),
        ((4, 8, 16), {"dtype": "float64"}, False),
    ],
)
def test_few_elements_and_open_dimensions_are_not_compiled(shape, options, is_compiled):
    model = stacked(shape, layers.BatchNormalization(**options))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, *shape])])
    def step(inputs):
        with COMPILED.in_place(model):
            return model(inputs, training=True)

    assert has_compiled_loops(step) == is_compiled
    notices = COMPILED.notices(model)
    assert (
        notices == ["1 BatchNormalization layer compiled for the CPU (tuned_for_cpu=False disables this)"]
    ) == (is_compiled)


def test_compiled_moments_of_many_rows_keep_their_digits():
    """Summed one after the other, 131,072 numbers would lose more than a digit."""
    shape = (128, 32, 32, 16)
    inputs = drawn(shape, mean=30.0)
    exact = inputs.numpy().astype(np.float64)
    mean, variance = compiled.CompiledKernel(1e-3).moments(inputs)
    np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), rtol=2e-7)
    np.testing.assert_allclose(variance, exact.var((0, 1, 2)), rtol=5e-7)


@pytest.mark.parametrize(
    "shape",
    [
        *[(32, 32, 16), (2, 2, 2048), (3, 5, 8)],
        *first_quick([((32, 32, 48),), ((15, 15, 64),), ((3, 3, 256),), ((7, 200),)], 0),
    ],
)
def test_compiled_loops_over_rows_of_several_pixels(shape):
    """Sums and scales of a row's pixels are those of their channels."""
    inputs = drawn((3, *shape), mean=2.0)
    kernel = compiled.CompiledKernel(1e-3)
    scale = tf.constant(np.linspace(1, 2, shape[-1]), tf.float32)
    moments = kernel.moments(inputs)
    dims = tuple(range(len(shape)))
    exact = inputs.numpy().astype(np.float64)
    np.testing.assert_allclose(moments.mean, exact.mean(dims), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(moments.variance, exact.var(dims), rtol=1e-6)
    normal = (exact - exact.mean(dims)) / np.sqrt(exact.var(dims) + 1e-3)
    found = kernel.normalized(inputs, moments, scale, -scale)
    np.testing.assert_allclose(found, normal * scale - scale, rtol=1e-5, atol=1e-5)
    upstream, count = upstream_of(inputs), exact.size // shape[-1]
    given = upstream.numpy().astype(np.float64)
    sums = (given * normal).sum(dims), given.sum(dims)
    centred = given - (sums[1] + normal * sums[0]) / count
    wanted = (centred * scale.numpy() / np.sqrt(exact.var(dims) + 1e-3), *sums)
    found = kernel.synced_gradients(inputs, moments, scale, upstream, lambda of_all: of_all / count)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())


def test_a_compiled_layer_takes_batches_of_any_length():
    """The tower is traced once; the last batch of an epoch is short."""
    model = layer_model(IMAGE)
    spec = tf.TensorSpec([None, *IMAGE[1:]])

    @tf.function(autograph=False, input_signature=[spec, spec])
    def step(inputs, upstream):
        return model_pass(model, inputs, upstream, kernels=COMPILED)

    for length in (6, 2, 6, 1):
        inputs = drawn((length, *IMAGE[1:]))
        upstream = upstream_of(inputs)
        assert_same(as_pass(step(inputs, upstream)), by_keras(model, inputs, upstream))
    assert step.experimental_get_tracing_count() == 1


# --- the layer is restored afterwards


def test_layers_are_restored():
    inner = stacked((3,), layers.BatchNormalization(name="inner"))
    model = stacked((3,), layers.BatchNormalization(name="outer"), inner)
    found = batch_norm_layers(model)
    assert [layer.name for layer in found] == ["outer", "inner"]
    with LayerKernels().in_place(model):
        assert all("call" in layer.__dict__ for layer in found)
    assert not any("call" in layer.__dict__ for layer in found)


def test_layers_are_restored_after_an_error():
    model = layer_model((2, 3))
    with pytest.raises(RuntimeError), LayerKernels().in_place(model):
        raise RuntimeError
    assert "call" not in batch_norm_layers(model)[0].__dict__


class OwnBatchNorm(layers.BatchNormalization):
    """A subclass with arithmetic of its own."""

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask) + 1.0


def test_a_subclass_keeps_its_own_call():
    model = stacked((3,), OwnBatchNorm())
    with LayerKernels().in_place(model):
        assert "call" not in model.layers[-1].__dict__


FELL_BACK = {
    "axis": stacked((4, 4, 3), layers.BatchNormalization(axis=1)),
    "float64": stacked((3,), layers.BatchNormalization(dtype="float64")),
    "mask": stacked((4, 3), layers.Masking(), layers.BatchNormalization()),
    "renorm": stacked((3,), layers.BatchNormalization(renorm=True)),
    "small epsilon": stacked((3,), layers.BatchNormalization(epsilon=1e-6)),
}


@pytest.mark.parametrize("why", FELL_BACK)
def test_layers_that_keep_keras_arithmetic_are_not_counted(why):
    assert num_fused(FELL_BACK[why]) == 0
    assert LayerKernels().notices(FELL_BACK[why]) == []


def test_a_layer_that_is_never_called_is_not_counted():
    model = stacked((3,), layers.BatchNormalization())
    model.spare = layers.BatchNormalization()
    assert len(batch_norm_layers(model)) == 2 and num_fused(model) == 1


@pytest.mark.parametrize("options", [{}, {"axis": 3}, {"dtype": "mixed_bfloat16"}], ids=str)
def test_fused_layers_are_counted(options):
    model = stacked(
        (4, 4, 3), layers.BatchNormalization(**options), stacked((4, 4, 3), layers.BatchNormalization())
    )
    assert num_fused(model) == 2
    assert "2 BatchNormalization layers on TensorFlow's fused kernel" in LayerKernels().notices(model)[0]


def test_exchanged_layers_are_not_counted_as_fused():
    (notice,) = LayerKernels().notices(layer_model(IMAGE), exchanges=True)
    assert notice == "1 BatchNormalization layer with the statistics of the whole batch"
    model = stacked((4, 3), layers.BatchNormalization(), layers.Dense(3), layers.BatchNormalization(axis=1))
    (notice,) = LayerKernels(compiled_batch_norm=True).notices(model, exchanges=True)
    assert notice == (
        "2 BatchNormalization layers with the statistics of the whole batch, 1 compiled for the CPU "
        "(tuned_for_cpu=False disables this)"
    )


# --- statistics exchanged over the towers


def exchanged_pass(model, parts, upstreams, weights, **options) -> list[Pass]:
    """Each tower's pass on its own logical device; all towers run one traced graph, as in `TowerFunction`."""
    exchange = TowerExchange(len(parts))

    def tower(inputs, upstream, weight):
        return model_pass(model, inputs, upstream, exchange=exchange, weight=weight, **options)

    spec = tf.TensorSpec([None, *parts[0].shape[1:]], tf.float32)
    traced = tf.function(tower, autograph=False).get_concrete_function(spec, spec, tf.TensorSpec([], tf.float32))

    @tf.function(autograph=False)
    def towers():
        found = []
        for index, arguments in enumerate(zip(parts, upstreams, weights, strict=True)):
            with tf.device(f"/device:CPU:{index}"):
                found.append(traced(*arguments))
        return found

    return [as_pass(tensors) for tensors in towers()]


def joined(passes: list[Pass]) -> Pass:
    """The towers' passes as one pass over all their examples; the state is the first tower's."""
    return Pass(
        np.concatenate([one.outputs for one in passes]),
        np.concatenate([one.inputs_gradient for one in passes]),
        [np.sum(of_one, 0) for of_one in zip(*(one.gradients for one in passes), strict=True)],
        passes[0].state,
    )


EXCHANGED = [
    (SHAPES["vectors"], {}, [3, 2, 1]),
    (IMAGE, {"center": False, "momentum": 0.5, "epsilon": 0.1}, [3, 2, 1]),
    (IMAGE, {"axis": 1}, [3, 2, 1]),
    (SHAPES["sequences"], {}, [3, 2, 1]),
    (IMAGE, {"scale": False}, [3, 2, 1]),
    (IMAGE, {}, [3, 2, 1]),
    (IMAGE, {}, [2, 2, 2]),
]


@pytest.mark.parametrize("shape, options, sizes", first_quick(EXCHANGED, 2), ids=str)
@every_kernel
def test_exchanged_gives_the_numbers_of_the_whole_batch(shape, options, sizes, kernels):
    shape = (sum(sizes), *shape[1:])
    model, inputs = layer_model(shape, **options), drawn(shape)
    upstream = upstream_of(inputs)
    parts, upstreams = tf.split(inputs, sizes), tf.split(upstream, sizes)
    passes = exchanged_pass(model, parts, upstreams, [tf.constant(1.0)] * 3, kernels=kernels)
    assert_same(joined(passes), by_keras(model, inputs, upstream))
    for one in passes[1:]:
        np.testing.assert_array_equal(one.state, passes[0].state)


def test_the_size_of_a_nonzero_weight_does_not_matter():
    """The layer gets the loss scale as its weight, but every tower's examples count the same."""
    model, inputs = layer_model(IMAGE), drawn(IMAGE)
    upstream = upstream_of(inputs)
    parts, upstreams = tf.split(inputs, 3), tf.split(upstream, 3)
    passes = [joined(exchanged_pass(model, parts, upstreams, [tf.constant(w)] * 3)) for w in (1.0, 256.0)]
    assert_same(passes[1], passes[0], tolerance=0)


@shapes_of_kernels
def test_a_tower_of_weight_0_adds_nothing(shape, kernels):
    """Like an idle tower it gets one example, and its upstream gradient is 0, because its gain is 0."""
    model, inputs = layer_model(shape), drawn(shape)
    upstream = upstream_of(inputs)
    sizes = (4, shape[0] - 4)
    parts = [*tf.split(inputs, sizes), inputs[:1]]
    upstreams = [*tf.split(upstream, sizes), tf.zeros_like(upstream[:1])]
    weights = [tf.constant(weight) for weight in (1.0, 1.0, 0.0)]
    *busy, idle = exchanged_pass(model, parts, upstreams, weights, kernels=kernels)
    assert_same(joined(busy), by_keras(model, inputs, upstream))
    assert not np.any(idle.inputs_gradient) and not any(np.any(value) for value in idle.gradients)
    np.testing.assert_array_equal(idle.state, busy[0].state)


def test_exchanged_keeps_digits_where_the_mean_is_large():
    shape = (6, 4)
    inputs = drawn(shape, mean=3000.0)
    upstream = upstream_of(inputs)
    model = layer_model(shape)
    passes = exchanged_pass(model, tf.split(inputs, 3), tf.split(upstream, 3), [tf.constant(1.0)] * 3)
    exact = (inputs.numpy().astype(np.float64)).var(0)
    expected = model.layers[-1].moving_variance.numpy() * 0.99 + exact * 0.01
    # The towers' own means have the digits of float32, which leaves 1e-4 of a standard deviation here.
    np.testing.assert_allclose(passes[0].state[1], expected, rtol=1e-5)


@shapes_of_kernels
def test_one_exchange_in_each_direction(shape, kernels):
    """All numbers of a direction travel together: each exchange makes the towers wait for each other."""
    model, inputs = layer_model(shape), drawn(shape)

    @tf.function(autograph=False)
    def one_pass(inputs, upstream):
        return model_pass(model, inputs, upstream, exchange=TowerExchange(2), kernels=kernels)

    operations = one_pass.get_concrete_function(inputs, upstream_of(inputs)).graph.get_operations()
    types = [operation.type for operation in operations]
    assert types.count("CollectiveReduce") == 2
    assert ("FusedBatchNormGradV3" in types) == (kernels is FUSED)


def test_exchanged_bfloat16_is_near():
    model, inputs = layer_model(IMAGE, dtype="mixed_bfloat16"), drawn(IMAGE)
    upstream = upstream_of(inputs)
    passes = exchanged_pass(model, tf.split(inputs, 3), tf.split(upstream, 3), [tf.constant(1.0)] * 3)
    assert_same(joined(passes), by_keras(model, inputs, upstream), tolerance=0.02)


def test_inference_exchanges_nothing():
    model, inputs = layer_model(IMAGE), drawn(IMAGE)
    upstream = upstream_of(inputs)
    found = as_pass(model_pass(model, inputs, upstream, training=False, exchange=TowerExchange(3)))
    assert_same(found, by_keras(model, inputs, upstream, training=False))


@pytest.mark.parametrize(
    "layer",
    [
        layers.BatchNormalization(renorm=True, name="moving"),
        OwnBatchNorm(name="moving"),
        layers.BatchNormalization(epsilon=1e-6, name="moving"),
    ],
    ids=["renorm", "subclass", "small epsilon"],
)
def test_what_cannot_be_exchanged(layer):
    model = stacked((3,), layer)
    with (
        refused("batch_stats='synced'", "'moving'", "batch_stats='average'"),
        LayerKernels().in_place(model, TowerExchange(2)),
    ):
        pass
    assert "call" not in layer.__dict__


def test_a_mask_cannot_be_exchanged():
    model = stacked((4, 3), layers.Masking(), layers.BatchNormalization(name="masked"))
    with (
        refused("batch_stats='synced'", "'masked'", "mask"),
        LayerKernels().in_place(model, TowerExchange(2)),
    ):
        model(tf.ones([2, 4, 3]), training=True)
