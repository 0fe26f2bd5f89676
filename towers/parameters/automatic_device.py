"""The default parameter device of a process with towers on GPUs: arithmetic on plain numbers.

    state = parameters + gradients + optimizer state, all whole

    state up to half of a GPU's memory    one GPU         on it
                                          several GPUs    a copy on each; on the first if tables are read by rows
    more                                  on the CPU, with the optimizer state and the update

The other half is for the rest of a step: the values that it reads (copied where the update comes before the last
reader), each tower's own gradients, and activations. Never measured on GPUs.
"""

import dataclasses

# Fraction of a GPU's memory that the state may take.
_PART_FOR_STATE = 0.5
CPU, FIRST_GPU, ON_EACH = "cpu", "gpu:0", "replicated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The chosen parameter device.

    Attributes:
      device: value for the argument `parameter_device`: CPU, FIRST_GPU or ON_EACH.
      reason: a sentence for the user.
    """

    device: str
    reason: str


def chosen_device(
    *,
    num_gpus: int,
    parameter_bytes: int,
    slot_bytes: int,
    gpu_bytes: int | None,
    reads_rows: bool = False,
) -> Chosen:
    """The best parameter device.

    Args:
      num_gpus: number of GPUs with towers, at least 1.
      parameter_bytes: size of all parameters; gradients are as large.
      slot_bytes: size of the optimizer state.
      gpu_bytes: memory of the smallest of these GPUs; None if it is not known, which counts as enough.
      reads_rows: whether steps read only their batch's rows of large tables, which requires all parameters on one
        device.
    """
    state_bytes = 2 * parameter_bytes + slot_bytes
    state = f"{_text(state_bytes)} of parameters, gradients and optimizer state"
    limit = None if gpu_bytes is None else _PART_FOR_STATE * gpu_bytes
    if limit is not None and state_bytes > limit:
        return Chosen(device=CPU, reason=_too_large(state, gpu_bytes, 2 * parameter_bytes > limit, num_gpus))
    memory = "a GPU's memory, whose size is unknown" if gpu_bytes is None else f"half of {_text(gpu_bytes)}"
    fits = f"{state} fit {memory}"
    if num_gpus == 1:
        return Chosen(device=FIRST_GPU, reason=f"the only GPU of this process; {fits}")
    if reads_rows:
        reason = f"a step reads and changes only some rows of large tables, which needs them on one device; {fits}"
        return Chosen(device=FIRST_GPU, reason=reason)
    return Chosen(device=ON_EACH, reason=f"each of {num_gpus} GPUs updates its own copy; {fits}")


def _too_large(state: str, gpu_bytes: int, gradients_are_too: bool, num_gpus: int) -> str:
    """The reason for the CPU, and the option that divides the state over GPUs instead."""
    why = f"{state} are more than half of a GPU's {_text(gpu_bytes)}"
    if num_gpus == 1:
        return why
    stage = "zero=3 divides all of it" if gradients_are_too else "zero=1 divides the optimizer state"
    return f"{why}; {stage} over the GPUs instead"


def _text(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"
