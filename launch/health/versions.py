"""Installed versions, the devices TensorFlow was built for, and the Keras backend."""

import importlib.metadata
import platform
import sys

import keras
import tensorflow as tf
from packaging.requirements import Requirement

import towers
from launch.health.section import Section

PACKAGES = ("tensorflow", "keras", "tensorflow-datasets", "numpy")
DISTRIBUTION = "towers-training"


def versions() -> Section:
    """Versions of this project, Python and the packages it needs, and the Keras backend."""
    installed = {package: _version(package) for package in PACKAGES}
    problems = [
        f"{package} is required but not installed; run pip install {package}"
        for package, version in installed.items()
        if version is None
    ]
    problems += _wrong_versions()
    facts = {
        "towers": _own_version(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": platform.platform(),
        **{package: version or "not installed" for package, version in installed.items()},
        "tensorflow built for": _built_for(),
        # launch/at_import/keras_backend.py refuses others.
        "keras backend": keras.config.backend(),
    }
    return Section(facts=facts, problems=tuple(problems))


def _own_version() -> str:
    installed = _version(DISTRIBUTION) is not None
    return towers.__version__ if installed else f"{towers.__version__}, not installed: runs from its source folder"


def _wrong_versions() -> list[str]:
    """A line for each package whose installed version is not one that this project needs."""
    if _version(DISTRIBUTION) is None:
        return []
    needed = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or ())
    found = [(one, _version(one.name)) for one in needed if one.marker is None]
    return [
        f"{one.name} {version} is installed, and {DISTRIBUTION} needs {one}: run pip install '{one}'"
        for one, version in found
        if version is not None and not one.specifier.contains(version, prereleases=True)
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _built_for() -> str:
    build = tf.sysconfig.get_build_info()
    if build.get("is_rocm_build"):
        return f"ROCm {build.get('rocm_version', '(unknown version)')}"
    if not build.get("is_cuda_build"):
        return "CPU only"
    capabilities = ", ".join(build.get("cuda_compute_capabilities", ()))
    versions = f"CUDA {build.get('cuda_version')}, cuDNN {build.get('cudnn_version')}"
    return f"{versions}, compute capabilities {capabilities}" if capabilities else versions
