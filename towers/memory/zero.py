"""Model states of data parallel training with ZeRO, in bytes per device.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054, section 5 and table 1. P parameters, N devices, and K bytes of optimizer state for each parameter:

    zero=0   (2 + 2 + K) P              nothing is sharded
    zero=1   (2 + 2) P + K P / N        the optimizer state is
    zero=2   2 P + (2 + K) P / N        and gradients
    zero=3   (2 + 2 + K) P / N          and parameters
"""

import dataclasses

from towers.errors import UserError


@dataclasses.dataclass(frozen=True)
class BytesPerParameter:
    """What one parameter costs.

    Attributes:
      parameter_bytes: the parameter that the passes read.
      gradient_bytes: its gradient.
      optimizer_bytes: what the update rule keeps: slots, and a precise copy of the parameter if there is one.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


# The paper's K = 12: a copy of the parameter, momentum and variance, each in float32. The rest is float16.
MIXED_PRECISION_ADAM = BytesPerParameter(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12)


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """The model states on one device; for sharded ones the mean over the devices."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def model_states(
    num_parameters: int, num_devices: int, *, zero: int, each: BytesPerParameter = MIXED_PRECISION_ADAM
) -> ModelStates:
    """The bytes of parameters, gradients and optimizer state on each device.

    Args:
      num_parameters: number of parameters of the whole model.
      num_devices: over which the states are sharded.
      zero: what is sharded: 0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.
      each: what one parameter costs.

    Raises:
      UserError: `zero` is not 0 to 3, or there is no device.
    """
    if zero not in range(4):
        raise UserError(
            f"zero={zero}: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too; "
            "give one of these"
        )
    if num_devices < 1:
        raise UserError(f"{num_devices} devices: at least one holds the model; give 1 or more")
    return ModelStates(
        parameters_bytes=num_parameters * each.parameter_bytes / (num_devices if zero >= 3 else 1),
        gradients_bytes=num_parameters * each.gradient_bytes / (num_devices if zero >= 2 else 1),
        optimizer_bytes=num_parameters * each.optimizer_bytes / (num_devices if zero >= 1 else 1),
    )
