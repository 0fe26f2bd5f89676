"""Drawn text: a random Markov chain of order 2, whose best loss is known by arithmetic.

Nothing is stored or downloaded. A text is a hash of its index, so any part of any batch can be computed on
its own, and the set is the same on every machine and for every training seed.

Token 0 stands for no token: before a text, and after its end. The others are 1 .. W with W = num_tokens - 1. Given
the two tokens before it, b and a, the next token is

    favourite(b, a)      with probability 1/2: a hash of both
    usual(a)             with probability 1/4: a hash of the last token alone
    any other token      with probability 1 / (4 (W - 2)) each

So whatever came before, the entropy of a token, in nats, is

    ln(2) / 2 + ln(4) / 4 + ln(4 (W - 2)) / 4

No model has a lower expected loss, or a higher expected accuracy than 1/2. A model that sees only the last token
knows the usual token, and has an accuracy of little more than 1/4.
"""

import dataclasses
import math

import tensorflow as tf

from models.data.batch_stream import derived_seed
from models.data.hashed_numbers import uniform_numbers
from models.data.splits import checked_split
from models.field_checks import check_at_least_1
from towers.errors import UserError

NO_TOKEN = 0
NUM_TRAIN, NUM_EVAL = 10_000, 2_000
_FEWEST_TOKENS = 4  # so that W - 2 is at least 1
_MOST_TOKENS = 2**31 - 1  # ids are int32
_DATA_SEED = 20_261_122  # The set is the same whatever the training seed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnText:
    """A set of drawn texts; see the module.

    Attributes:
      num_tokens: size of the vocabulary, token 0 included.
      length: number of tokens in the longest texts. Lengths are uniform from ceil(length / 2) to length.
      num_train, num_eval: number of texts in 'train' and 'eval'.

    Raises:
      UserError: a number is out of range.
    """

    num_tokens: int = 32
    length: int = 64
    num_train: int = NUM_TRAIN
    num_eval: int = NUM_EVAL

    def __post_init__(self):
        check_at_least_1(self, "length", "num_train", "num_eval")
        if not _FEWEST_TOKENS <= self.num_tokens <= _MOST_TOKENS:
            raise UserError(
                f"num_tokens={self.num_tokens}: must be from {_FEWEST_TOKENS} to {_MOST_TOKENS}; token 0 is "
                "padding"
            )

    @property
    def entropy(self) -> float:
        """Entropy of a token given those before it, in nats: the lowest expected loss of any model."""
        return math.log(2) / 2 + math.log(4) / 4 + math.log(4 * (self._num_words - 2)) / 4

    @property
    def _num_words(self) -> int:
        """Number of tokens that occur in texts."""
        return self.num_tokens - 1

    def num_examples(self, split: str) -> int:
        """Number of texts in 'train' or 'eval'."""
        return self.num_train if checked_split(split) == "train" else self.num_eval

    def gather(self, split: str, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The texts of `split` at `indices` int64 [n]; works in a tf.data graph.

        Returns:
          tokens: int32 [n, length], what a model reads: token 0, then the text without its last token.
          labels: int64 [n, length], what it predicts at each position: the text, then zeros. TensorFlow reshapes
            and compares int32 on the host, which would wait for a GPU.
        """
        counters = indices[:, None]
        lengths = self._lengths(uniform_numbers(_seeds(f"{checked_split(split)} length", 1), counters))
        # One seed for each position, so that a longer text begins with the shorter one.
        words = self._chain(uniform_numbers(_seeds(f"{split} token", self.length), counters))
        labels = tf.where(tf.range(self.length, dtype=tf.int64) < lengths, words, NO_TOKEN)
        tokens = tf.pad(labels[:, :-1], [[0, 0], [1, 0]], constant_values=NO_TOKEN)
        return tf.cast(tokens, tf.int32), labels

    def likely_tokens(self, before: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The tokens of probability 1/2 and 1/4 after the tokens `before`, `last`, each int64 [n].

        Where both hashes give the same token t, the usual one is t + 1, or 1 if t = W.
        """
        pairs = (before * self.num_tokens + last)[:, None]
        favourite = self._hashed_word("favourite", pairs)
        usual = self._hashed_word("usual", last[:, None])
        usual = tf.where(tf.equal(usual, favourite), (usual + 1) % self._num_words, usual)
        return favourite + 1, usual + 1

    def _hashed_word(self, purpose: str, counters: tf.Tensor) -> tf.Tensor:
        """A hash 0 .. W - 1, int64 [n], of counters int64 [n, 1]."""
        (column,) = tf.unstack(uniform_numbers(_seeds(purpose, 1), counters), num=1, axis=1)
        return _floor(column, self._num_words)

    def _lengths(self, uniform: tf.Tensor) -> tf.Tensor:
        shortest = -(-self.length // 2)
        return shortest + _floor(uniform, self.length - shortest + 1)

    def _chain(self, uniform: tf.Tensor) -> tf.Tensor:
        """Tokens int64 [n, length], from uniform numbers of the same shape."""
        nothing = tf.fill([tf.shape(uniform)[0]], tf.constant(NO_TOKEN, tf.int64))

        def next_pair(pair, column):
            return pair[1], self._next_token(*pair, column)

        _, tokens = tf.scan(next_pair, tf.transpose(uniform), (nothing, nothing))
        return tf.transpose(tokens)

    def _next_token(self, before: tf.Tensor, last: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
        favourite, usual = self.likely_tokens(before, last)
        # The uniform numbers from 3/4 on choose evenly among 1 .. W - 2, which skips the two likely tokens.
        other = 1 + _floor(tf.maximum(uniform - 3 / 4, 0) * 4, self._num_words - 2)
        for likely in (tf.minimum(favourite, usual), tf.maximum(favourite, usual)):
            other += tf.cast(other >= likely, tf.int64)
        return tf.where(uniform < 1 / 2, favourite, tf.where(uniform < 3 / 4, usual, other))


def _floor(uniform: tf.Tensor, count: int) -> tf.Tensor:
    """floor(count * u), int64: below count, because u is at most 1 - 2**-51 and count below 2**31."""
    return tf.cast(uniform * count, tf.int64)


def _seeds(purpose: str, count: int) -> list[int]:
    return [derived_seed(_DATA_SEED, f"text {purpose} {index}") for index in range(count)]
