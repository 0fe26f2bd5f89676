"""Which kernels TensorFlow runs on CPUs: oneDNN's, or its own on Eigen."""

import functools

from tensorflow.python.util import _pywrap_util_port  # the only way to ask


@functools.cache
def runs_onednn() -> bool:
    """Whether oneDNN's kernels run, which was decided when TensorFlow was imported."""
    return bool(_pywrap_util_port.IsMklEnabled())


def cpu_kernels() -> str:
    """'oneDNN' or 'Eigen'."""
    return "oneDNN" if runs_onednn() else "Eigen"
