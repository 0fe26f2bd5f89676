"""The devices of a test process: four logical CPUs of one thread each, made before TensorFlow computes."""

import os

# TensorFlow reads it while it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from towers.devices import configure_devices

# A process has its devices once: tests of fewer towers use the first of these.
configure_devices(num_towers=4, kind="cpu", threads_per_tower=1)
