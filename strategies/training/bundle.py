"""The files of one checkpoint, in TensorFlow's format, written and read piece by piece.

    pieces -> part-0 | part-1 | ...  -> merged: PREFIX.data-00000-of-0000N, ..., PREFIX.index

The tensors' names and the object graph are those that tf.train.Checkpoint writes, so it reads these files, and
files that it wrote are read here. TensorFlow itself would collect all tensors of a file before it writes one.
"""

import functools
import os
import pathlib
from collections.abc import Iterable, Mapping

import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from strategies import pieces
from strategies.pieces import Piece

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
_HOST = "/device:CPU:0"


def tensor_name(path: Iterable[str]) -> str:
    """Name of a tensor in the files, from its path in the checkpoint's tree."""
    escaped = (name.replace(".", "..").replace("/", ".S") for name in path)
    return f"{'/'.join(escaped)}/.ATTRIBUTES/{_VALUE}"


class BundleWriter:
    """Writes one checkpoint; holds at most `PIECE_BYTES` of values, or one piece."""

    def __init__(self, prefix: pathlib.Path, tree: Mapping):
        """Args:
        prefix: prefix of the files; shards are written beside them.
        tree: nested mappings by name, like the checkpoint's; a value that is not a mapping stands for a variable.
        """
        self._prefix, self._shards = prefix, []
        self._names, self._specs, self._values, self._bytes = [], [], [], 0
        self._add(_GRAPH, "", tf.constant(object_graph(tree).SerializeToString()), 0)

    def add(self, piece: Piece, value) -> None:
        """Adds the value of a piece, and writes earlier ones if they fill a shard."""
        if self._bytes + piece.num_bytes > pieces.PIECE_BYTES:
            self._write()
        self._add(tensor_name(piece.path), piece.slice_spec, value, piece.num_bytes)

    def add_text(self, name: str, text: str) -> None:
        """Adds a text, which tf.train.Checkpoint reads as the variable `name` of its root."""
        self._add(tensor_name([name]), "", tf.constant(text), 0)

    def close(self) -> None:
        """Writes the remaining pieces, and merges all shards into one checkpoint."""
        self._write()
        with tf.device(_HOST):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=self._shards, destination_prefix=str(self._prefix), delete_old_dirs=False
            )

    def _add(self, name: str, spec: str, value, num_bytes: int) -> None:
        self._names.append(name)
        self._specs.append(spec)
        self._values.append(value)
        self._bytes += num_bytes

    def _write(self) -> None:
        if not self._names:
            return
        shard = str(self._prefix.with_name(f"part-{len(self._shards)}"))
        with tf.device(_HOST):
            tf.raw_ops.SaveV2(
                prefix=shard, tensor_names=self._names, shape_and_slices=self._specs, tensors=self._values
            )
        self._shards.append(shard)
        self._names, self._specs, self._values, self._bytes = [], [], [], 0


def read_piece(prefix: str, piece: Piece) -> tf.Tensor:
    """The values of a piece, in the host's memory. Raises tf.errors.OpError or OSError if they can't be read.

    TensorFlow reads each stored slice that overlaps the piece as a whole. Floating-point values stored by a run of
    another precision are cast.
    """
    name = tensor_name(piece.path)
    stored = _stored_dtypes(prefix, os.stat(f"{prefix}.index").st_mtime_ns).get(name, piece.dtype)
    is_cast = stored.is_floating and piece.dtype.is_floating
    with tf.device(_HOST):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[name],
            shape_and_slices=[piece.slice_spec],
            dtypes=[stored if is_cast else piece.dtype],
        )
        return tf.cast(value, piece.dtype)


@functools.lru_cache(maxsize=1)
def _stored_dtypes(prefix: str, written: int) -> Mapping[str, tf.DType]:
    """The dtypes of a bundle's tensors, by name; `written`, its time of writing, is a key of the cache."""
    return tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()


def read_text(prefix: str, name: str) -> str:
    """A text that `BundleWriter.add_text` added."""
    return tf.train.load_checkpoint(prefix).get_tensor(tensor_name([name])).decode()


def object_graph(tree: Mapping) -> TrackableObjectGraph:
    """The graph by which tf.train.Checkpoint finds tensors: a node per mapping and variable, root first."""
    graph = TrackableObjectGraph()
    _add_node(graph, tree, ())
    return graph


def _add_node(graph: TrackableObjectGraph, tree, path: tuple[str, ...]) -> int:
    index, node = len(graph.nodes), graph.nodes.add()
    node.has_checkpoint_values.value = True
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            node.children.add(node_id=_add_node(graph, child, (*path, name)), local_name=name)
    else:
        node.attributes.add(name=_VALUE, full_name="/".join(path), checkpoint_key=tensor_name(path))
    return index
