"""Mechanisms on the devices of one process: tensors and device names, no cluster, flags or files."""

import lazy_loader

from towers.hardware.fast_kernels import use_fast_kernels

# Before any module here, or of the packages above, imports TensorFlow.
use_fast_kernels()

# The only place with the version: setup.cfg, summary.json and the doctor read it here.
__version__ = "0.1.0"

# A public name is imported at its first use: importing towers.errors alone does not import TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
