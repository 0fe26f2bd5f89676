"""Random models and their examples: many kinds of layers, with skips, branches, shared, nested and frozen ones."""

import dataclasses
from collections.abc import Mapping

import keras
import numpy as np
from keras import layers

from models.own_task import OwnTask

NUM_CLASSES = 3
NUM_TOKENS, NUM_WORDS = 6, 11
KINDS = ("images", "vectors", "tokens", "sequences", "images and tokens")


@dataclasses.dataclass(frozen=True)
class RandomModel:
    """A random model, determined by a seed.

    Attributes:
      seed: determines the layers.
      kind: kind of the inputs, one of KINDS.
      has_branches: whether images pass through parallel convolutions.
    """

    seed: int
    kind: str
    has_branches: bool

    def build(self) -> keras.Model:
        """A new model; every layer has a name, so that all copies have the same ones."""
        return _Builder(np.random.default_rng(self.seed)).model(self)

    def task(self, draw: np.random.Generator, num_workers: int = 1) -> OwnTask:
        """A task with random examples for all workers; its last batch is often much smaller than the others."""
        bounds = (18, 40), (7, 30), (6, 15)
        train, held_out, batch_size = (num_workers * int(draw.integers(*each)) for each in bounds)
        is_weighted = draw.random() < 0.5
        reduction = "mean_with_sample_weight" if is_weighted and draw.random() < 0.5 else "sum_over_batch_size"

        def examples(count: int) -> tuple:
            labels = draw.integers(0, NUM_CLASSES, count).astype(np.int32)
            weights = draw.choice([0.5, 1.0, 2.0], count).astype(np.float32)
            return (self._features(draw, count), labels, weights)[: 3 if is_weighted else 2]

        return OwnTask(
            model=self.build,
            train_data=examples(train),
            eval_data=examples(held_out),
            losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
            metric_functions={"accuracy": keras.metrics.sparse_categorical_accuracy},
            batch_size=batch_size,
        )

    def _features(self, draw: np.random.Generator, count: int) -> np.ndarray | Mapping[str, np.ndarray]:
        images = draw.normal(size=(count, 8, 8, 3)).astype(np.float32)
        tokens = draw.integers(0, NUM_WORDS, (count, NUM_TOKENS)).astype(np.int32)
        return {
            "images": images,
            "vectors": draw.normal(size=(count, 7)).astype(np.float32),
            "tokens": tokens,
            "sequences": draw.normal(size=(count, 5, 4)).astype(np.float32),
            "images and tokens": {"image": images, "tokens": tokens},
        }[self.kind]


class _Builder:
    """Draws the layers of one model."""

    def __init__(self, draw: np.random.Generator):
        self._draw, self._count = draw, 0

    def model(self, wanted: RandomModel) -> keras.Model:
        inputs, outputs = self._trunk(wanted)
        for _ in range(int(self._draw.integers(0, 3))):
            outputs = self._after(self._named(layers.Dense, int(self._draw.choice([5, 6, 8])))(outputs))
        if self._happens(0.2):
            shared = self._named(layers.Dense, 6)
            outputs = shared(self._activated(shared(self._named(layers.Dense, 6)(outputs))))
        if self._happens(0.15):
            inner = layers.Input((outputs.shape[-1],))
            outputs = keras.Model(inner, self._named(layers.Dense, 5, "tanh")(inner), name="nested")(outputs)
        model = keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(outputs))
        if self._happens(0.15):
            frozen = [layer for layer in model.layers if layer.weights][:-1]
            if frozen:
                frozen[int(self._draw.integers(len(frozen)))].trainable = False
        return model

    def _trunk(self, wanted: RandomModel):
        images, tokens = (
            layers.Input((8, 8, 3), name="image"),
            layers.Input((NUM_TOKENS,), None, "int32", name="tokens"),
        )
        if wanted.kind == "images":
            return images, self._of_images(images, wanted.has_branches)
        if wanted.kind == "tokens":
            return tokens, self._of_tokens(tokens)
        if wanted.kind == "images and tokens":
            parts = [self._of_images(images, wanted.has_branches), self._of_tokens(tokens)]
            return {"image": images, "tokens": tokens}, self._named(layers.Concatenate)(parts)
        inputs = layers.Input((5, 4) if wanted.kind == "sequences" else (7,))
        return inputs, self._of_sequences(inputs) if wanted.kind == "sequences" else inputs

    def _of_images(self, outputs, has_branches: bool):
        blocks = [self._branches] if has_branches else []
        kinds = (self._residual, self._branches, self._squeezed, self._convolved, self._convolved)
        blocks += [kinds[self._draw.integers(len(kinds))] for _ in range(int(self._draw.integers(1, 4)))]
        for block in blocks:
            outputs = block(outputs)
            if outputs.shape[1] > 3 and self._happens(0.25):
                outputs = self._named(layers.MaxPooling2D, 2)(outputs)
        ends = layers.Flatten, layers.GlobalMaxPooling2D, layers.GlobalAveragePooling2D
        return self._named(ends[self._draw.integers(len(ends))])(outputs)

    def _of_tokens(self, tokens):
        table = self._named(
            layers.Embedding, NUM_WORDS, int(self._draw.choice([4, 6])), mask_zero=self._happens(0.2)
        )
        return self._of_sequences(table(tokens))

    def _of_sequences(self, outputs):
        for _ in range(int(self._draw.integers(1, 3))):
            kind = self._draw.choice(["lstm", "gru", "rnn", "both ways", "attention", "convolution", "dense"])
            if kind in ("lstm", "gru", "rnn"):
                cell = {"lstm": layers.LSTM, "gru": layers.GRU, "rnn": layers.SimpleRNN}[kind]
                outputs = self._named(cell, 5, return_sequences=True)(outputs)
            elif kind == "both ways":
                outputs = self._named(layers.Bidirectional, layers.LSTM(3, return_sequences=True))(outputs)
            elif kind == "attention":
                heads = self._named(layers.MultiHeadAttention, 2, 3)
                found = heads(outputs, outputs, use_causal_mask=self._happens(0.5))
                outputs = self._named(layers.LayerNormalization)(self._named(layers.Add)([outputs, found]))
            elif kind == "convolution":
                outputs = self._activated(self._named(layers.Conv1D, 6, 3, padding="same")(outputs))
            else:
                outputs = self._after(self._named(layers.Dense, 6)(outputs))
        if self._happens(0.3):
            return outputs[:, -1]
        return self._named(layers.GlobalAveragePooling1D if self._happens(0.7) else layers.Flatten)(outputs)

    def _residual(self, inputs):
        skipped = self._named(layers.Conv2D, 4, 1)(inputs)
        return self._named(layers.Add)(
            [skipped, self._after(self._named(layers.Conv2D, 4, 3, padding="same")(inputs))]
        )

    def _branches(self, inputs):
        found = [self._after(self._named(layers.Conv2D, 4, size, padding="same")(inputs)) for size in (1, 3)]
        return self._named(layers.Concatenate)(found)

    def _squeezed(self, inputs):
        means = self._named(layers.GlobalAveragePooling2D, keepdims=True)(inputs)
        return self._named(layers.Multiply)(
            [inputs, self._named(layers.Dense, inputs.shape[-1], "sigmoid")(means)]
        )

    def _convolved(self, inputs):
        filters = int(self._draw.choice([4, 6, 8]))
        kind = self._draw.choice(
            ["plain", "plain", "strided", "separable", "by channel", "transposed", "dilated", "groups"]
        )
        if kind == "by channel":
            layer = self._named(layers.DepthwiseConv2D, 3, padding="same")
        elif kind == "separable":
            layer = self._named(layers.SeparableConv2D, filters, 3, padding="same")
        elif kind == "transposed":
            layer = self._named(layers.Conv2DTranspose, filters, 3, padding="same")
        else:
            groups = 2 if kind == "groups" and inputs.shape[-1] % 2 == 0 else 1
            more = {"strided": {"strides": 2}, "dilated": {"dilation_rate": 2}}.get(kind, {"groups": groups})
            layer = self._named(layers.Conv2D, filters, 3, padding="same", use_bias=self._happens(0.6), **more)
        return self._after(layer(inputs))

    def _after(self, outputs):
        """Adds an activation, in most cases after a normalisation, and rarely a dropout."""
        kind = self._draw.choice(["batch", "batch", "layer", "groups", "none", "none"])
        if kind == "batch":
            outputs = self._named(layers.BatchNormalization, momentum=0.8, scale=self._happens(0.8))(outputs)
        elif kind == "layer":
            outputs = self._named(layers.LayerNormalization)(outputs)
        elif kind == "groups" and outputs.shape[-1] % 2 == 0:
            outputs = self._named(layers.GroupNormalization, 2)(outputs)
        outputs = self._activated(outputs)
        return self._named(layers.Dropout, 0.3)(outputs) if self._happens(0.04) else outputs

    def _activated(self, outputs):
        kind = self._draw.choice(["relu", "gelu", "silu", "tanh", "softplus", "leaky", "with weights", "none"])
        if kind == "none":
            return outputs
        own = {"leaky": layers.LeakyReLU, "with weights": layers.PReLU}
        layer = self._named(own[kind]) if kind in own else self._named(layers.Activation, str(kind))
        return layer(outputs)

    def _named(self, kind, *arguments, **options):
        self._count += 1
        return kind(*arguments, name=f"{kind.__name__.lower()}_{self._count}", **options)

    def _happens(self, probability: float) -> bool:
        return bool(self._draw.random() < probability)
