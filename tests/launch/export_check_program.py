"""Runs `launch.export`'s check on a file in which all rows of an embedding but the first are damaged.

Its argument, if there is one, is the number of seconds that the check may take.
"""

import pathlib

import keras
import numpy as np

from launch import binary, export
from models.own_task import OwnTask
from strategies.training.export import save_model

NUM_ROWS = 50


def build() -> keras.Model:
    ids = keras.Input((4,), dtype="int32", name="ids")
    rows = keras.layers.Embedding(NUM_ROWS, 3, name="table")(ids)
    return keras.Model(ids, keras.layers.Dense(2, name="logits")(keras.layers.Flatten()(rows)))


def main(arguments: list[str]) -> None:
    if arguments[1:]:
        export._CHECK_SECONDS = float(arguments[1])
    draw = np.random.default_rng(0)
    ids, labels = draw.integers(0, NUM_ROWS, (8, 4)).astype(np.int32), draw.integers(0, 2, 8)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = OwnTask(model=build, train_data=(ids, labels), losses=losses, batch_size=8)
    model, damaged = task.build_model(), task.build_model()
    table, *others = model.get_weights()
    damaged.set_weights([np.where(np.arange(NUM_ROWS)[:, None] > 0, table + 1, table), *others])
    path = save_model(damaged, pathlib.Path("damaged.keras"))
    print("agree to", export.checked_apart(model, path, export.first_inputs(task, model)))


if __name__ == "__main__":
    binary.run(main, takes_operand=True, trains=False)
