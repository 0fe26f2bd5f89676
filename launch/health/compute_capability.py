"""Whether the GPU kernels in TensorFlow's package run on a GPU: plain arithmetic on compute capabilities.

A package holds binaries for some capabilities ('sm_80'), and for others both a binary and code that the driver
compiles ('compute_90'). A binary for X.Y runs on X.Z with Z >= Y, the code on its capability and all later ones.
"""

import re
from collections.abc import Sequence


def how_it_runs(capability: tuple[int, int], built_for: Sequence[str]) -> str:
    """How the kernels run on the GPU: 'kernels for 8.0', or that they are compiled first; '' if they don't run.

    Args:
      capability: capability of the GPU, as (8, 6).
      built_for: capabilities from `tf.sysconfig.get_build_info()`, as 'sm_80' or 'compute_90'.
    """
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", text) for text in built_for]
    kinds = [(found[1], (int(found[2]), int(found[3]))) for found in known if found]
    binaries = [one for _, one in kinds if one[0] == capability[0] and one <= capability]
    if binaries:
        return f"kernels for {_text(max(binaries))}"
    compiled = [one for kind, one in kinds if kind == "compute" and one <= capability]
    if compiled:
        return (
            f"kernels for {_text(max(compiled))}, which the driver compiles at the first start: it takes minutes"
        )
    return ""


def problem_of(model: str, capability: tuple[int, int], built_for: Sequence[str]) -> str:
    """A line if no kernel of the package runs on the GPU; '' if some do, or if `built_for` is empty."""
    if not built_for or how_it_runs(capability, built_for):
        return ""
    return (
        f"{model} has compute capability {_text(capability)}, but TensorFlow was built for "
        f"{', '.join(built_for)}: install a TensorFlow that was built for it, or use --tower_device=cpu"
    )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
