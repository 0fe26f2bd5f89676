"""The set 'shapes': ten kinds of figures, 32x32 RGB, drawn in about a second, the same on every machine.

A figure of random colour, size, position and rotation is drawn on a background of another colour with a gradient
in brightness, under noise. All arithmetic is on whole numbers, so that no machine can round differently. Lengths
are in quarters of a pixel; angles ("turns") are in 240ths of a circle, and their cosines in 1024ths.
"""

import functools
import math
from collections.abc import Callable

import numpy as np

from models.data.image_store import ImageSet, ImageStore

CLASS_NAMES = (
    "circle",
    "square",
    "triangle",
    "cross",
    "ring",
    "star",
    "horizontal stripes",
    "vertical stripes",
    "diagonal stripes",
    "checker",
)
# Multiples of the default batch size, 128: a shorter last batch would need compiled kernels of its own.
NUM_TRAIN, NUM_EVAL = 7_680, 1_280
SIDE = 32  # pixels
_QUARTERS = 4  # of a pixel
_TURNS = 240
_UNIT = 1024
_COSINES = np.array([round(_UNIT * math.cos(2 * math.pi * turn / _TURNS)) for turn in range(_TURNS)], np.int32)
_DATA_SEED = 20_240_229  # The set is the same whatever the training seed.
_CHUNK = 1000  # images drawn at once, to use little memory

# With smaller or fainter figures the accuracy of the classic CNN stays at 10% for several epochs. With these, its
# held-out accuracy is about 90% after one epoch and 97 to 99% after four.
_MIN_RADIUS, _MAX_RADIUS = 48, 60  # quarters of a pixel
_MAX_GROUND = 144  # largest value of a background's channel
_MIN_LIGHT, _MAX_LIGHT = 60, 112  # difference between a figure's channel and its background's
# One image in `_ONE_FAINT_IN` has a figure with 1 / `_FAINTER` of that difference: no network recognises all of
# these.
_ONE_FAINT_IN, _FAINTER = 80, 12
_MIN_NOISE, _MAX_NOISE = 8, 40  # largest absolute noise of a channel, drawn for each image
# Pixel statistics of the training images by channel, as `channel_statistics` computes them.
_MEAN = (98.08009236653646, 97.28462460835775, 98.63579228719075)
_STD = (59.74992828371315, 59.726069468298356, 59.96069824649799)
_SLOPE = 24  # largest change in brightness from edge to edge


class _Frame:
    """Coordinates of the pixels of n images relative to the figure of each image.

    Attributes:
      across, down: int32 [n, 1, SIDE] and [n, SIDE, 1], quarters of a pixel from the figure's centre.
      radius: int32 [n, 1, 1], quarters of a pixel.
      turn: int32 [n, 1, 1], the figure's rotation in 240ths of a circle.
    """

    def __init__(self, column: np.ndarray, row: np.ndarray, radius: np.ndarray, turn: np.ndarray):
        positions = np.arange(SIDE, dtype=np.int32) * _QUARTERS
        self.across = (positions - column[:, None])[:, None, :]
        self.down = (positions - row[:, None])[:, :, None]
        self.radius = radius[:, None, None]
        self.turn = turn[:, None, None]

    def along(self, turn: int = 0) -> np.ndarray:
        """Distance from the centre along the figure's direction + `turn`: int32 [n, SIDE, SIDE], times `_UNIT`."""
        direction = (self.turn + turn) % _TURNS
        return self.across * _COSINES[direction] + self.down * _COSINES[direction - _TURNS // 4]

    def squared_distance(self) -> np.ndarray:
        """Squared distance from the centre: int32 [n, SIDE, SIDE], in squared quarters of a pixel."""
        return self.across**2 + self.down**2

    def half_planes_holding(self, sides: int, distance: int) -> np.ndarray:
        """Number of half planes that contain each pixel, int32 [n, SIDE, SIDE].

        The `sides` half planes contain the centre; their borders are `distance` / 1000 radii away from it.
        """
        limit = self.radius * _UNIT * distance // 1000
        return sum((self.along(side * _TURNS // sides) <= limit).astype(np.int32) for side in range(sides))


def shapes_images(num_images: int, *, seed: int = _DATA_SEED) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 32, 32, 3] and labels int64 [N]; the sizes of the classes differ by at most one."""
    random = np.random.Generator(np.random.PCG64(seed))
    labels = random.permutation(np.arange(num_images, dtype=np.int64) % len(CLASS_NAMES))
    images = np.empty((num_images, SIDE, SIDE, 3), np.uint8)
    for start in range(0, num_images, _CHUNK):
        images[start : start + _CHUNK] = _draw(labels[start : start + _CHUNK], random)
    return images, labels


@functools.cache
def drawn() -> tuple[np.ndarray, np.ndarray]:
    """All images and labels of the set, drawn once in a process."""
    return shapes_images(NUM_TRAIN + NUM_EVAL)


def shapes_set() -> ImageSet:
    """The training images and the held-out images, drawn at their first use."""

    def open_store(split: str) -> ImageStore:
        images, labels = drawn()
        part = slice(0, NUM_TRAIN) if split == "train" else slice(NUM_TRAIN, None)
        return ImageStore(
            images=images[part], labels=labels[part], num_classes=len(CLASS_NAMES), name=f"shapes {split}"
        )

    return ImageSet(
        name="shapes",
        image_shape=(SIDE, SIDE, 3),
        num_classes=len(CLASS_NAMES),
        num_examples={"train": NUM_TRAIN, "eval": NUM_EVAL},
        open_store=open_store,
        known_mean=_MEAN,
        known_std=_STD,
    )


def _draw(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Images uint8 [n, SIDE, SIDE, 3] of the given kinds."""
    num_images = len(labels)
    radius = random.integers(_MIN_RADIUS, _MAX_RADIUS + 1, num_images, dtype=np.int32)
    # The range of the centre keeps most of the figure inside the image.
    free = SIDE * _QUARTERS - 2 * (radius * 3 // 4)
    centres = radius * 3 // 4 + random.integers(0, 1 << 16, (2, num_images), dtype=np.int32) * free // (1 << 16)
    turn = _turns(labels, random)
    inside = np.empty((num_images, SIDE, SIDE), bool)
    for kind, figure in enumerate(_FIGURES):
        chosen = labels == kind
        frame = _Frame(centres[0][chosen], centres[1][chosen], radius[chosen], turn[chosen])
        inside[chosen] = figure(frame)
    return _paint(inside, random)


def _turns(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Rotations int32 [n] in 240ths of a circle: any for figures, at most 15 degrees for stripes.

    At larger angles horizontal, vertical and diagonal stripes would look the same.
    """
    turn = random.integers(0, _TURNS, len(labels), dtype=np.int32)
    sway = turn % 21 - 10
    is_swaying = (labels >= CLASS_NAMES.index("horizontal stripes")) & (labels < CLASS_NAMES.index("checker"))
    mirrored = np.where((labels == CLASS_NAMES.index("diagonal stripes")) & (turn >= _TURNS // 2), _TURNS // 4, 0)
    return np.where(is_swaying, (sway + mirrored) % _TURNS, turn).astype(np.int32)


def _paint(inside: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Images uint8 [n, SIDE, SIDE, 3] from masks bool [n, SIDE, SIDE]: adds colours, a gradient and noise."""
    num_images = len(inside)
    ground = random.integers(0, _MAX_GROUND, (num_images, 3), dtype=np.int16)
    light = random.integers(_MIN_LIGHT, _MAX_LIGHT, (num_images, 3), dtype=np.int16)
    is_faint = random.integers(0, _ONE_FAINT_IN, (num_images, 1), dtype=np.int16) == 0
    ink = ground + np.where(is_faint, light // _FAINTER, light)
    pixels = np.where(inside[..., None], ink[:, None, None], ground[:, None, None])
    positions = np.arange(SIDE, dtype=np.int16) - SIDE // 2
    slopes = random.integers(-_SLOPE, _SLOPE + 1, (2, num_images, 1), dtype=np.int16)
    shade = (slopes[0] * positions // SIDE)[:, :, None] + (slopes[1] * positions // SIDE)[:, None, :]
    noise = random.integers(0, 256, pixels.shape, dtype=np.uint8).astype(np.int16) - 128
    noise = noise * random.integers(_MIN_NOISE, _MAX_NOISE + 1, (num_images, 1, 1, 1), dtype=np.int16) // 128
    return np.clip(pixels + shade[..., None] + noise, 0, 255).astype(np.uint8)


def _circle(frame: _Frame) -> np.ndarray:
    return frame.squared_distance() <= frame.radius**2


def _square(frame: _Frame) -> np.ndarray:
    return frame.half_planes_holding(4, 800) == 4


def _triangle(frame: _Frame) -> np.ndarray:
    return frame.half_planes_holding(3, 550) == 3


def _cross(frame: _Frame) -> np.ndarray:
    one, other = np.abs(frame.along()), np.abs(frame.along(_TURNS // 4))
    long, short = frame.radius * _UNIT, frame.radius * _UNIT * 3 // 10
    return (np.maximum(one, other) <= long) & (np.minimum(one, other) <= short)


def _ring(frame: _Frame) -> np.ndarray:
    squared, outer = frame.squared_distance(), frame.radius**2
    return (squared <= outer) & (squared * 100 >= outer * 36)


def _star(frame: _Frame) -> np.ndarray:
    # A pentagram is the set of points in at least four of five half planes whose borders are cos(72 degrees) radii
    # away from the centre. (The drawn one uses 340 / 1000, and ends at 11 / 10 of the radius.)
    return (frame.half_planes_holding(5, 340) >= 4) & (frame.squared_distance() <= (frame.radius * 11 // 10) ** 2)


def _striped(turn: int) -> Callable[[_Frame], np.ndarray]:
    return lambda frame: _circle(frame) & _bands(frame, turn)


def _checker(frame: _Frame) -> np.ndarray:
    return _circle(frame) & (_bands(frame, 0) ^ _bands(frame, _TURNS // 4))


def _bands(frame: _Frame, turn: int) -> np.ndarray:
    """Every second band across the direction `turn`; bands are radius // 4 + 4 quarters of a pixel wide."""
    width = (frame.radius // 4 + 4) * _UNIT
    return frame.along(turn) // width % 2 == 0


# In the order of CLASS_NAMES.
_FIGURES: tuple[Callable[[_Frame], np.ndarray], ...] = (
    _circle,
    _square,
    _triangle,
    _cross,
    _ring,
    _star,
    _striped(_TURNS // 4),
    _striped(0),
    _striped(_TURNS // 8),
    _checker,
)
