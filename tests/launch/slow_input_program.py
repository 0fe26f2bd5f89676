"""A user's own program on a ring or parameter servers: a small network with slow input.

SECONDS_PER_BATCH              seconds that the input of each batch takes; default: 0.04
SECONDS_PER_EVALUATION_BATCH   likewise, of an evaluation; default: 0
DATA_IS_CHECKED                1: no batch is read before the run
BATCH_NORM                     1: the model has a batch norm
NAN_FROM                       the input is not finite from the batch with this index on
SILENT_SECONDS                 seconds after which a listening process that says nothing counts as of another kind
DATA_SEED                      seed of drawn training data, then from a tf.data pipeline, which is not slow
"""

import os
import time

import numpy as np

from launch import binary, training
from strategies import waiting
from tests.launch.spoilt_task import build, pipeline_task, spoilt_task, with_statistics

_SECONDS = float(os.environ.get("SECONDS_PER_BATCH", 0.04))
_EVALUATION_SECONDS = float(os.environ.get("SECONDS_PER_EVALUATION_BATCH", 0))
_IS_CHECKED = bool(os.environ.get("DATA_IS_CHECKED"))
_MODEL = with_statistics if os.environ.get("BATCH_NORM") else build
_NAN_FROM = int(os.environ.get("NAN_FROM", 2**31))
_DATA_SEED = os.environ.get("DATA_SEED")
# The processes of a cluster wait for each other before `main`.
waiting._SILENT_SECONDS = float(os.environ.get("SILENT_SECONDS", waiting._SILENT_SECONDS))


def slow_input(batch_index):
    time.sleep(_SECONDS)
    return np.float32("nan" if batch_index >= _NAN_FROM else 1)


def slow_evaluation(batch_index):
    time.sleep(_EVALUATION_SECONDS)
    return np.float32(1)


def main(_):
    training.serve_if_server()
    if _DATA_SEED is not None:
        task = pipeline_task(int(_DATA_SEED))
    else:
        evaluation = slow_evaluation if _EVALUATION_SECONDS else None
        task = spoilt_task(slow_input, _MODEL, evaluation, data_is_checked=_IS_CHECKED)
    training.build_trainer(training.build_strategy(task)).fit()


if __name__ == "__main__":
    binary.run(main)
