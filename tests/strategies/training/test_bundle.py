"""Checkpoints in pieces are those of tf.train.Checkpoint, and no shard is larger than the limit."""

import numpy as np
import pytest
import tensorflow as tf

from strategies import pieces
from strategies.pieces import parts_of, pieces_of
from strategies.training.bundle import BundleWriter, read_piece, read_text
from towers.parameters.sliced_variable import SlicedVariable

MATRIX = np.arange(60, dtype=np.float32).reshape(12, 5)


def contents(scale: float = 1.0) -> dict:
    """A tree as a strategy gives it: plain variables, one in slices of columns, and a scalar."""
    matrix = scale * MATRIX
    columns = SlicedVariable([tf.Variable(matrix[:, :2]), tf.Variable(matrix[:, 2:])], 1)
    return {
        "parameters": {"layer.0/kernel": tf.Variable(matrix), "layer.0/bias": tf.Variable(matrix[0])},
        "slots": {"momentum": {"layer.0/kernel": columns}},
        "counters": {"step": tf.Variable(int(scale), dtype=tf.int64)},
    }


def plain(scale: float) -> dict:
    """The same tree with plain variables only."""
    return {
        "parameters": {
            "layer.0/kernel": tf.Variable(scale * MATRIX),
            "layer.0/bias": tf.Variable(scale * MATRIX[0]),
        },
        "slots": {"momentum": {"layer.0/kernel": tf.Variable(scale * MATRIX)}},
        "counters": {"step": tf.Variable(int(scale), dtype=tf.int64)},
    }


def write(prefix, tree) -> None:
    writer = BundleWriter(prefix, {**tree, "layout": None})
    writer.add_text("layout", "text")
    for piece in pieces_of(tree):
        writer.add(piece, piece.value())
    writer.close()


def assert_is(tree, scale: float) -> None:
    for part, expected in zip(parts_of(tree), parts_of(contents(scale)), strict=True):
        np.testing.assert_array_equal(part.value(), expected.value(), err_msg=str(part.path))


@pytest.fixture(params=[8, 44, pieces.PIECE_BYTES], ids=["rows", "two_rows", "whole"])
def limit(request, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", request.param)
    return request.param


def test_what_is_written_is_read(tmp_path, limit):
    write(tmp_path / "saved", contents(3.0))
    assert len(list(tmp_path.glob("saved.data-*"))) > 8 or limit > 1000
    assert not list(tmp_path.glob("part-*"))
    found = contents()
    for part in parts_of(found):
        part.variable.assign(read_piece(str(tmp_path / "saved"), part))
    assert_is(found, 3.0)
    assert read_text(str(tmp_path / "saved"), "layout") == "text"


def test_tensorflow_reads_it(tmp_path, limit):
    write(tmp_path / "saved", contents(3.0))
    found = plain(1.0)
    checkpoint = tf.train.Checkpoint(**found, layout=tf.Variable(""))
    checkpoint.read(str(tmp_path / "saved")).assert_consumed().assert_existing_objects_matched()
    np.testing.assert_array_equal(found["slots"]["momentum"]["layer.0/kernel"], 3 * MATRIX)
    assert int(found["counters"]["step"]) == 3


def test_it_reads_what_tensorflow_wrote(tmp_path, limit):
    """TensorFlow, like earlier versions of this project, wrote each tensor in one slice."""
    tf.train.Checkpoint(**plain(3.0), layout=tf.Variable("text")).write(str(tmp_path / "saved"))
    found = contents()
    for part in parts_of(found):
        for piece in part.divided():
            np.testing.assert_array_equal(read_piece(str(tmp_path / "saved"), piece), 3 * piece.value().numpy())
    assert read_text(str(tmp_path / "saved"), "layout") == "text"


def test_the_names_are_those_of_tensorflow(tmp_path):
    write(tmp_path / "ours", contents())
    tf.train.Checkpoint(**plain(1.0), layout=tf.Variable("")).write(str(tmp_path / "theirs"))
    ours, theirs = (
        tf.train.load_checkpoint(str(tmp_path / name)).get_variable_to_shape_map() for name in ("ours", "theirs")
    )
    assert ours == theirs


def test_a_shard_is_no_larger_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    sizes, save = [], tf.raw_ops.SaveV2

    def saved(*, tensors, **named):
        sizes.append(sum(np.asarray(value).nbytes for value in tensors if value.dtype != tf.string))
        save(tensors=tensors, **named)

    monkeypatch.setattr(tf.raw_ops, "SaveV2", saved)
    write(tmp_path / "saved", contents())
    assert max(sizes) <= 100
    assert sum(sizes) == 2 * MATRIX.nbytes + MATRIX[0].nbytes + 8


def test_pieces_of_all_cuts_lie_in_the_same_blocks_of_rows(monkeypatch):
    """So a piece that one mode reads lies in few slices that another mode has written."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 5 * MATRIX[0].nbytes)
    uneven = SlicedVariable([tf.Variable(MATRIX[:4]), tf.Variable(MATRIX[4:])], 0)
    found = [(piece.begin, piece.shape) for piece in pieces_of({"kernel": uneven})]
    assert found == [((0, 0), (4, 5)), ((4, 0), (1, 5)), ((5, 0), (5, 5)), ((10, 0), (2, 5))]
    columns = contents()["slots"]
    assert {piece.begin[0] for piece in pieces_of(columns)} == {0, 5, 10}


@pytest.mark.parametrize("shape, cuts", [((), 1), ((1, 12), 3), ((0, 4), 1), ((1, 1), 1)], ids=str)
def test_pieces_of_odd_shapes(monkeypatch, shape, cuts):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 20)
    found = pieces_of({"odd": tf.Variable(tf.zeros(shape))})
    assert len(found) == cuts
    assert sum(np.prod(piece.shape) for piece in found) == np.prod(shape)
