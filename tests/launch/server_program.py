"""A user's own program on parameter servers: a small network whose input takes its time.

SECONDS_PER_BATCH   of each batch's input; default: 0.04
NAN_FROM            the input of batches from this one on is not finite
"""

import os
import time

import numpy as np

from launch import binary, train, training
from tests.launch.spoilt_task import spoilt_task

_SECONDS = float(os.environ.get("SECONDS_PER_BATCH", 0.04))
_NAN_FROM = int(os.environ.get("NAN_FROM", 2**31))


def late(number):
    time.sleep(_SECONDS)
    return np.float32("nan" if number >= _NAN_FROM else 1)


def main(_):
    training.serve_if_server()
    return train.train(spoilt_task(late))


if __name__ == "__main__":
    binary.run(main)
