"""Runs `launch.export`'s check on a file in which all rows of an embedding but the first are damaged."""

import pathlib

import keras
import numpy as np

from launch.export import checked_apart, first_inputs
from models.own_task import OwnTask
from strategies.training.export import save_model

NUM_ROWS = 50


def build() -> keras.Model:
    ids = keras.Input((4,), dtype="int32", name="ids")
    rows = keras.layers.Embedding(NUM_ROWS, 3, name="table")(ids)
    return keras.Model(ids, keras.layers.Dense(2, name="logits")(keras.layers.Flatten()(rows)))


def main() -> None:
    draw = np.random.default_rng(0)
    ids, labels = draw.integers(0, NUM_ROWS, (8, 4)).astype(np.int32), draw.integers(0, 2, 8)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = OwnTask(model=build, train_data=(ids, labels), losses=losses, batch_size=8)
    model, damaged = task.build_model(), task.build_model()
    table, *others = model.get_weights()
    damaged.set_weights([np.where(np.arange(NUM_ROWS)[:, None] > 0, table + 1, table), *others])
    path = save_model(damaged, pathlib.Path("damaged.keras"))
    print("agree to", checked_apart(model, path, first_inputs(task, model)))


if __name__ == "__main__":
    main()
