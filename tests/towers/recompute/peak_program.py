"""Prints the growth of the peak resident memory, in MiB, over two steps of a chain of blocks.

python -m tests.towers.recompute.peak_program RECOMPUTE
"""

import pathlib
import sys

import keras
import numpy as np
from keras import layers

from tests.towers.tiny_tasks import TinyTask, cross_entropy, trainer_of
from towers.task import Batch

# A block keeps a hidden tensor and passes one of 0.25 MiB on.
NUM_BLOCKS, EXAMPLES, WIDTH, HIDDEN = 10, 4096, 16, 1024
HIDDEN_MEBIBYTES = EXAMPLES * HIDDEN * 4 / 2**20


def chain() -> keras.Model:
    outputs = inputs = layers.Input((WIDTH,))
    for _ in range(NUM_BLOCKS):
        hidden = layers.Dense(HIDDEN, "tanh")(outputs)
        outputs = layers.Add()([outputs, layers.Dense(WIDTH)(hidden)])
    return keras.Model(inputs, layers.Dense(3)(outputs))


def resident_mebibytes(field: str) -> float:
    """VmRSS: now. VmHWM: the peak so far."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    draw = np.random.default_rng(0)
    examples = Batch(
        draw.normal(size=(EXAMPLES, WIDTH)).astype(np.float32), draw.integers(0, 3, EXAMPLES).astype(np.int32)
    )
    task = TinyTask(build=chain, examples=examples, losses=cross_entropy)
    strategy = trainer_of(task, recompute=sys.argv[1], rate=0.001)
    before = resident_mebibytes("VmRSS")
    strategy.run_steps(2)
    print(resident_mebibytes("VmHWM") - before)


if __name__ == "__main__":
    main()
