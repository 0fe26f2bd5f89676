"""Copies outcomes of steps from their device to the host.

    GPU    | step 8 | step 9 | pack | copy to the host |
                                    | step 10          | step 11 | ...

A GPU works in the order of requests, so a copy waits for all steps that were started before it. If it is requested
before the next step is started, it waits only for its own steps, and the GPU continues meanwhile.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.mean_and_update import StepOutcome


def on_host(outcomes: Sequence[StepOutcome]) -> list[StepOutcome]:
    """Waits for steps and returns their outcomes as arrays, with one transfer for each device."""
    return _Packed(outcomes).read() if outcomes else []


class Arrived(NamedTuple):
    """Outcomes as arrays, and the time of their arrival by `time.perf_counter`."""

    outcomes: list[StepOutcome]
    at: float


def arriving_on_host(outcomes: Sequence[StepOutcome]) -> Callable[[], Arrived]:
    """Starts `on_host` without waiting for the steps; the returned function waits."""
    packed, found, begun = _Packed(outcomes), concurrent.futures.Future(), threading.Event()

    def read() -> None:
        begun.set()
        try:
            found.set_result(Arrived(packed.read(), time.perf_counter()))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=read, name="outcomes", daemon=True).start()
    # The thread then has Python's lock, and keeps it until it has requested the copy and waits.
    begun.wait()
    return found.result


class _Packed:
    """The numbers of some steps, packed exactly into one float64 tensor [numbers, steps] for each device."""

    def __init__(self, outcomes: Sequence[StepOutcome]):
        self._structure, self._num_steps = outcomes[0], len(outcomes)
        self._numbers = list(zip(*map(tf.nest.flatten, outcomes), strict=True))
        by_device: dict[str, list[int]] = {}
        for index, (first, *_) in enumerate(self._numbers):
            # Grouped by the device of the memory: a GPU would finish its work before it takes a number from the
            # host. In a cluster the memory's device has a job name that operations must not use.
            by_device.setdefault("/" + first.backing_device.rpartition("/")[2], []).append(index)
        self._packed = [(indices, self._pack(device, indices)) for device, indices in by_device.items()]

    def _pack(self, device: str, indices: Sequence[int]) -> tf.Tensor:
        with tf.device(device):
            return tf.stack([tf.cast(tf.stack(self._numbers[index]), tf.float64) for index in indices])

    def read(self) -> list[StepOutcome]:
        found: list[np.ndarray] = [np.empty(0)] * len(self._numbers)
        for indices, packed in self._packed:
            for index, of_steps in zip(indices, packed.numpy(), strict=True):
                found[index] = of_steps.astype(self._numbers[index][0].dtype.as_numpy_dtype)
        return [
            tf.nest.pack_sequence_as(self._structure, [of_steps[at] for of_steps in found])
            for at in range(self._num_steps)
        ]
