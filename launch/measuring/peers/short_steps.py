"""Keras or PyTorch on the work of the group short_steps: training steps of the network `tiny`.

    python short_steps.py --library=keras --steps_per_execution=32        (needs tensorflow)
    python short_steps.py --library=torch                                 (needs only torch and numpy)

prints one JSON line: images per second, and CPU seconds of all threads per step. The network: a 3x3 convolution
with stride 4 to 8 channels, ReLU, and a dense layer to 10 classes; SGD with momentum. Each step computes the same
batch, which is in memory. For Keras this measures `Model.fit`, without its first epoch.
"""

import argparse
import json
import time

# Steps to run for each one of --steps, because steps are short.
FACTOR = 50
WARM_UP_SECONDS = 2.0
RATE, MOMENTUM = 0.01, 0.9


def keras_epochs(options):
    """A function that runs some steps."""
    import keras
    import numpy as np
    import tensorflow as tf

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(8, 3, strides=4, padding="same", use_bias=False),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(RATE, MOMENTUM, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=options.steps_per_execution,
    )
    draw = np.random.default_rng(0)
    batch = draw.random((options.batch, 32, 32, 3), np.float32), draw.integers(0, 10, options.batch)
    data = tf.data.Dataset.from_tensors(batch).repeat()
    return lambda steps: model.fit(data, steps_per_epoch=steps, verbose=0)


def torch_epochs(options):
    """A function that runs some steps."""
    import torch
    from torch import nn

    torch.set_num_threads(options.threads)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, 4, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), RATE, MOMENTUM, nesterov=True)
    images, labels = torch.rand(options.batch, 3, 32, 32), torch.randint(0, 10, (options.batch,))

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()

    return run


LIBRARIES = {"keras": keras_epochs, "torch": torch_epochs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps_per_execution", type=int, default=1)
    options = parser.parse_args()
    run, steps = LIBRARIES[options.library](options), FACTOR * options.steps
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_UP_SECONDS:
        run(steps)
    begun, cpu = time.perf_counter(), time.process_time()
    run(steps)
    seconds = time.perf_counter() - begun
    line = {
        "peer": options.library,
        "batch": options.batch,
        "images_per_second": round(steps * options.batch / seconds, 1),
        "cpu_seconds_per_step": round((time.process_time() - cpu) / steps, 6),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
