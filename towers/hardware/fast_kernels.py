"""Switches on oneDNN's kernels on CPUs with AVX2.

By itself TensorFlow uses oneDNN on Linux only where a CPU has AVX-512's instructions for neural networks, or AMX.
Elsewhere its own kernels run. Two cores of an AMD EPYC (Zen 3, AVX2, float32), without and with: ResNet-20 277 and
521 images/s, VGG-16 18.4 and 68.0, classic_cnn 472 and 722, inception 94 and 155, the transformer 518 and 766
texts/s.

TensorFlow decides when it is imported, by an environment variable only. So importing any package of this project
sets the variable first (the other packages do it by importing `towers`). This is the only file outside launch/
that touches the environment. Programs that the process starts inherit the variable.
"""

import os
import pathlib
import sys
from collections.abc import MutableMapping

from towers.hardware.cpu_instructions import AVX2, CPU_INFO, cpu_instructions

_SWITCH = "TF_ENABLE_ONEDNN_OPTS"


def use_fast_kernels(environment: MutableMapping[str, str] = os.environ, info: pathlib.Path = CPU_INFO) -> None:
    """Sets the variable that TensorFlow reads when it is imported, for this process and those that it starts.

    Does nothing if the variable has a value, if TensorFlow is imported already, or on CPUs without AVX2.

    Args:
      environment: environment of this process.
      info: what Linux says about the CPU; on other systems there is no such file.
    """
    if _SWITCH not in environment and "tensorflow" not in sys.modules and AVX2 in cpu_instructions(info=info):
        environment[_SWITCH] = "1"
