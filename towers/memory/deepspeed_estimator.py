"""DeepSpeed's estimates of the memory for model states, for comparison with our own figures.

Source: `estimate_zero2_model_states_mem_needs` in deepspeed/runtime/zero/stage_1_and_2.py and
`estimate_zero3_model_states_mem_needs` in stage3.py, https://github.com/deepspeedai/DeepSpeed (commits 02aa38c3
and 007cca6a). P parameters, L in the largest layer, G GPUs a node, M nodes, N = G M GPUs, buffer factor F:

    ZeRO-2                                    GPU            CPU memory of a node
      optimizer on the CPU                    2 P            P max(4 N, 16) F
      nothing on the CPU                      2 P + 18 P/N   4 P G F

    ZeRO-3                                    GPU            CPU, built sharded   CPU, built whole
      optimizer and parameters on the CPU     4 L            18 P/M F             P max(4 G, 18/M) F
      optimizer on the CPU                    4 L + 2 P/N    16 P/M F             P max(4 G, 16/M) F
      nothing on the CPU                      4 L + 18 P/N   4 L G F              4 P G F

18 bytes: 2 for a parameter in float16 (in ZeRO-2 for a gradient), and 4 each for parameter, gradient, momentum and
variance in float32. 4 L: parameters and gradients of a gathered layer in float16. Until 2024 (DeepSpeed's pull
request 5099), and still in its documentation, ZeRO-2 took 4 P + 16 P/N on the GPU.
"""

import dataclasses

from towers.errors import UserError


@dataclasses.dataclass(frozen=True)
class DeepSpeedEstimate:
    """Memory for parameters, gradients and optimizer state.

    Attributes:
      cpu_bytes: main memory of each node.
      gpu_bytes: memory of each GPU.
    """

    cpu_bytes: int
    gpu_bytes: int


def zero2_estimate(
    num_parameters: int,
    *,
    gpus_per_node: int = 1,
    num_nodes: int = 1,
    offload_optimizer: bool = True,
    buffer_factor: float = 1.5,
) -> DeepSpeedEstimate:
    """DeepSpeed's estimate for ZeRO-2.

    Args:
      num_parameters: number of parameters of the whole model.
      gpus_per_node: GPUs of each node.
      num_nodes: number of nodes.
      offload_optimizer: whether optimizer state and update are on the CPU.
      buffer_factor: by which main memory is larger than what it holds.
    """
    num_gpus = gpus_per_node * num_nodes
    if offload_optimizer:
        cpu, gpu = num_parameters * max(4 * num_gpus, 16), 2 * num_parameters
    else:
        cpu, gpu = num_parameters * 4 * gpus_per_node, 2 * num_parameters + int(18 * num_parameters / num_gpus)
    return DeepSpeedEstimate(cpu_bytes=int(cpu * buffer_factor), gpu_bytes=gpu)


def zero3_estimate(
    num_parameters: int,
    largest_layer_parameters: int,
    *,
    gpus_per_node: int = 1,
    num_nodes: int = 1,
    offload_optimizer: bool = True,
    offload_parameters: bool = True,
    built_sharded: bool = True,
    buffer_factor: float = 1.5,
) -> DeepSpeedEstimate:
    """DeepSpeed's estimate for ZeRO-3.

    Args:
      num_parameters: number of parameters of the whole model.
      largest_layer_parameters: parameters of its largest layer, which is gathered as a whole.
      gpus_per_node: GPUs of each node.
      num_nodes: number of nodes.
      offload_optimizer: whether optimizer state and update are on the CPU.
      offload_parameters: whether parameters are there too.
      built_sharded: whether each layer is sharded as soon as it is built (DeepSpeed's zero_init).
      buffer_factor: by which main memory is larger than what it holds.

    Raises:
      UserError: parameters are on the CPU, but the optimizer is not.
    """
    if offload_parameters and not offload_optimizer:
        raise UserError(
            "offload_parameters=True with offload_optimizer=False: parameters are on the CPU only where the "
            "optimizer is too; set offload_optimizer=True or offload_parameters=False"
        )
    layer = 4 * largest_layer_parameters
    whole_on_cpu = num_parameters * 4 * gpus_per_node
    if offload_optimizer:
        cpu = num_parameters * (18 if offload_parameters else 16) / num_nodes
        on_gpu = 0 if offload_parameters else 2
        cpu = cpu if built_sharded else max(whole_on_cpu, cpu)
    else:
        on_gpu = 18
        cpu = layer * gpus_per_node if built_sharded else whole_on_cpu
    gpu = layer + int(on_gpu * num_parameters / (gpus_per_node * num_nodes))
    return DeepSpeedEstimate(cpu_bytes=int(cpu * buffer_factor), gpu_bytes=gpu)
