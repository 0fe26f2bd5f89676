"""A program ends although tf.data reads ahead for it from Python."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import time
import tensorflow as tf
from strategies.open_batches import OpenBatches

def slow(number):
    time.sleep(0.05)
    return number

def read(number):
    return tf.numpy_function(slow, [number], tf.int64)

batches = OpenBatches(iter(tf.data.Dataset.range(1000).map(read).prefetch(4)))
print(int(next(batches)), flush=True)
"""


def test_a_program_ends_while_python_reads_ahead():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr[-2000:]
