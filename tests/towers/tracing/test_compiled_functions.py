"""The graph optimizer sees functions that XLA compiles as empty; afterwards they are whole again."""

import pytest
import tensorflow as tf

from towers.tracing import compiled_functions, graph_optimizer
from towers.tracing.flat_graph import flat_graph

SPEC = tf.TensorSpec([None, 3])


@tf.function(jit_compile=True, autograph=False, input_signature=[SPEC])
def doubled_five_times(x):
    return tf.while_loop(lambda count, _: count < 5, lambda count, x: (count + 1, 2.0 * x), (0, x))[1], x + 1.0


@tf.function(autograph=False, input_signature=[SPEC])
def not_compiled(x):
    return tf.while_loop(lambda count, _: count < 2, lambda count, x: (count + 1, x - 1.0), (0, x))[1]


@tf.function(autograph=False, input_signature=[SPEC])
def whole_graph(x):
    doubled, more = doubled_five_times(x)
    return doubled_five_times(doubled)[0] + more + not_compiled(x)


def library():
    return whole_graph.get_concrete_function().graph.as_graph_def().library


def operations(found) -> dict[str, list[str]]:
    return {function.signature.name: sorted(node.op for node in function.node_def) for function in found.function}


def test_only_what_xla_compiles_is_empty():
    found = library()
    before = operations(compiled_functions.hide(found))
    (compiled,) = (name for name in before if "doubled_five_times" in name)
    after = operations(found)
    assert after.pop(compiled) == ["Placeholder", "Placeholder"]
    assert before.pop(compiled) != ["Placeholder", "Placeholder"]
    assert after == before


def test_all_functions_are_shown_again_even_those_that_the_optimizer_dropped():
    found, expected = library(), library()
    whole = compiled_functions.hide(found)
    kept = [function for function in found.function if "while" not in function.signature.name]
    del found.function[:]
    found.function.extend(kept)
    compiled_functions.show(found, whole)
    # The optimizer may have had a reason to drop the loop of the other function.
    others = {name for name in operations(expected) if "while" in name} - operations(found).keys()
    assert len(others) == 2
    assert operations(found) == {name: kinds for name, kinds in operations(expected).items() if name not in others}


def test_the_branches_of_a_compiled_case_are_shown_again():
    """A user's own layer may be compiled, with branches that only it calls: one attribute names them all."""

    @tf.function(jit_compile=True, autograph=False, input_signature=[SPEC])
    def of_several(x):
        branches = [lambda: x + 1.0, lambda: 2.0 * x, lambda: x - 1.0]
        return tf.switch_case(tf.cast(tf.reduce_sum(x), tf.int32), branches)

    caller = tf.function(lambda x: of_several(x) + 1.0, autograph=False).get_concrete_function(SPEC)
    found = caller.graph.as_graph_def().library
    whole = compiled_functions.hide(found)
    kept = [function for function in found.function if compiled_functions.is_compiled(function)]
    del found.function[:]
    found.function.extend(kept)
    compiled_functions.show(found, whole)
    assert len(found.function) == 4
    assert operations(found) == operations(whole)


@pytest.mark.parametrize("count", [1, 4])
def test_an_optimized_graph_computes_the_same(monkeypatch, count):
    monkeypatch.setattr(graph_optimizer, "must_optimize", lambda concrete: True)
    concrete = whole_graph.get_concrete_function()
    flat = flat_graph(concrete)
    assert any(function.attr["_XlaMustCompile"].b for function in flat.graph_def.library.function)
    x = tf.random.stateless_normal([count, 3], seed=[0, count])
    (found,) = flat.function([SPEC])(x)
    tf.debugging.assert_equal(found, concrete(x))
