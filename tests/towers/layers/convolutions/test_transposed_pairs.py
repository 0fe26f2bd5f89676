"""Transposed rows of 16-bit numbers: every bit of TensorFlow's, for any number of rows."""

import numpy as np
import pytest
import tensorflow as tf

from towers.layers.convolutions.transposed_pairs import transposed


def numbers_of(num_rows, length, dtype):
    """Numbers of random bits, among them NaN, infinities and subnormal numbers."""
    bits = np.random.default_rng(num_rows).integers(0, 2**16, (num_rows, length), np.uint16)
    bits[0, :3] = 0x7F81, 0xFF80, 0x0001
    return tf.bitcast(bits, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_bit_stays_as_it_was(dtype):
    function = tf.function(transposed, autograph=False, input_signature=[tf.TensorSpec([None, 10], dtype)])
    for num_rows in (1, 2, 7, 16):
        rows = numbers_of(num_rows, 10, dtype)
        np.testing.assert_array_equal(
            tf.bitcast(function(rows), tf.uint16), np.transpose(tf.bitcast(rows, tf.uint16))
        )


def test_the_transposition_is_of_words():
    """TensorFlow's transposition of 16-bit numbers takes ten times as long."""
    function = tf.function(transposed, autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec([None, 10], tf.bfloat16)).graph
    dtypes = [operation.inputs[0].dtype for operation in graph.get_operations() if operation.type == "Transpose"]
    assert dtypes == [tf.float32]


def test_in_a_vectorized_map():
    rows = tf.reshape(numbers_of(12, 10, "bfloat16"), [3, 4, 10])
    found = tf.function(lambda each: tf.vectorized_map(transposed, each), autograph=False)(rows)
    expected = np.transpose(tf.bitcast(rows, tf.uint16), [0, 2, 1])
    np.testing.assert_array_equal(tf.bitcast(found, tf.uint16), expected)
