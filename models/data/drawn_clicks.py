"""Drawn examples of a recommender: ids of several tables, dense numbers, and whether the user clicked.

Nothing is stored or downloaded. Every number of an example is a hash of its index, so any part of any batch can be
computed on its own, and the set is the same on every machine and for every training seed.

    id of a table     floor(rows * u**4) for a uniform u. So P(id < r) = (r / rows)**(1/4), a power law:
                      id 0 is the most frequent one, and the frequency of id r falls like (r + 1)**(-3/4)
    dense number      uniform, with mean 0 and variance 1
    logit             BIAS + SIGNAL * (sum over tables of score(table, id) / sqrt(tables)
                                       + sum over dense numbers of +-x / sqrt(dense numbers))
    label             1 with probability sigmoid(logit), else 0

score(table, id) is a hash too: uniform, with mean 0 and variance 1. About a quarter of the labels are 1. The
exponent is 1/4 because every machine rounds multiplications alike, but not logarithms and other powers.
"""

import dataclasses
import math
from collections.abc import Mapping

import tensorflow as tf

from models.data.batch_stream import derived_seed
from models.data.hashed_numbers import uniform_numbers
from models.data.splits import checked_split
from models.field_checks import check_at_least_1
from towers.errors import UserError

BIAS, SIGNAL = -1.8, 1.5
# The exponent of P(id < r) = (r / rows)**EXPONENT. `_ids` computes its inverse, the fourth power.
EXPONENT = 1 / 4
NUM_TRAIN, NUM_EVAL = 200_000, 50_000
_LARGEST_ROWS = 2**31 - 1  # ids are int32
_DATA_SEED = 20_240_301  # The set is the same whatever the training seed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnClicks:
    """A set of drawn examples; see the module.

    Attributes:
      num_tables: number of tables; an example has an id for each.
      num_rows: number of different ids in each table.
      num_dense: number of dense numbers in an example.
      num_train, num_eval: number of examples in 'train' and 'eval'.

    Raises:
      UserError: a number is below 1, or there are more rows than int32 ids.
    """

    num_tables: int = 8
    num_rows: int = 1_000
    num_dense: int = 4
    num_train: int = NUM_TRAIN
    num_eval: int = NUM_EVAL

    def __post_init__(self):
        check_at_least_1(self, *(field.name for field in dataclasses.fields(self)))
        if self.num_rows > _LARGEST_ROWS:
            raise UserError(
                f"num_rows={self.num_rows}: ids are 32-bit numbers, so a table has at most {_LARGEST_ROWS} rows"
            )

    def num_examples(self, split: str) -> int:
        """Number of examples in 'train' or 'eval'."""
        return self.num_train if checked_split(split) == "train" else self.num_eval

    @property
    def id_names(self) -> tuple[str, ...]:
        """Names of the ids among the features, one for each table."""
        return tuple(f"ids_{table}" for table in range(self.num_tables))

    def gather(self, split: str, indices: tf.Tensor) -> tuple[Mapping[str, tf.Tensor], tf.Tensor]:
        """The examples of `split` at `indices` int64 [n]; works in a tf.data graph.

        Returns:
          features: 'dense' float32 [n, num_dense], and for each name of `id_names` int32 [n].
          labels: int32 [n], 0 or 1.
        """
        columns = self._uniform_columns(checked_split(split), indices)
        ids = _ids(columns[:, : self.num_tables], self.num_rows)
        dense = _standard(columns[:, self.num_tables : -1])
        probabilities = tf.sigmoid(self.logits(ids, dense))
        labels = tf.cast(columns[:, -1] < probabilities, tf.int32)
        by_table = tf.unstack(tf.cast(ids, tf.int32), num=self.num_tables, axis=1)
        features = {"dense": tf.cast(dense, tf.float32)} | dict(zip(self.id_names, by_table, strict=True))
        return features, labels

    def logits(self, ids: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        """The true logits, float64 [n], of ids int64 [n, num_tables] and dense numbers float64 [n, num_dense]."""
        scores = _standard(uniform_numbers(_seeds("score", self.num_tables), ids))
        signs = tf.constant([(-1.0) ** index for index in range(self.num_dense)], tf.float64)
        from_ids = tf.reduce_sum(scores, axis=1) / math.sqrt(self.num_tables)
        from_dense = tf.reduce_sum(dense * signs, axis=1) / math.sqrt(self.num_dense)
        return BIAS + SIGNAL * (from_ids + from_dense)

    def _uniform_columns(self, split: str, indices: tf.Tensor) -> tf.Tensor:
        """Uniform numbers in [0, 1), float64 [n, columns]: one for each id, each dense number, and the label."""
        seeds = [
            *_seeds(f"{split} id", self.num_tables),
            *_seeds(f"{split} dense number", self.num_dense),
            *_seeds(f"{split} label", 1),
        ]
        return uniform_numbers(seeds, indices[:, None])


def _ids(uniform: tf.Tensor, num_rows: int) -> tf.Tensor:
    """floor(num_rows * u**4), int64: below num_rows, because u is at most 1 - 2**-53."""
    squares = tf.square(uniform)
    return tf.cast(tf.square(squares) * num_rows, tf.int64)


def _standard(uniform: tf.Tensor) -> tf.Tensor:
    """From uniform in [0, 1) to uniform with mean 0 and variance 1."""
    return (uniform * 2 - 1) * math.sqrt(3)


def _seeds(purpose: str, count: int) -> list[int]:
    return [derived_seed(_DATA_SEED, f"clicks {purpose} {index}") for index in range(count)]
