"""The GPUs that this process may use: model, compute capability and memory, asked without starting any of them."""

import ctypes
import dataclasses

import tensorflow as tf

_DRIVER = "libcuda.so.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
      index: its index among those that CUDA shows to this process.
      model: the maker's name, as 'NVIDIA H100 80GB HBM3'.
      compute_capability: as (9, 0); None if TensorFlow does not know it.
      memory_bytes: its total memory; None if the driver does not report it.
    """

    index: int
    model: str = "GPU"
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None

    @property
    def described(self) -> str:
        """'NVIDIA H100 80GB HBM3, compute capability 9.0'."""
        known = self.compute_capability
        return f"{self.model}, compute capability {'.'.join(map(str, known)) if known else 'unknown'}"


def gpu_of(physical: tf.config.PhysicalDevice) -> Gpu:
    """What is known of a GPU of `tf.config.list_physical_devices`."""
    details = tf.config.experimental.get_device_details(physical)
    index = int(physical.name.rpartition(":")[2])
    return Gpu(
        index=index,
        model=details.get("device_name", "unknown model"),
        compute_capability=details.get("compute_capability"),
        memory_bytes=memory_bytes(index),
    )


def memory_bytes(index: int, driver: str = _DRIVER) -> int | None:
    """Memory of the GPU with this index, from CUDA's driver; None if the driver does not report it.

    TensorFlow reports it only after it has started the GPU.

    Args:
      index: among the GPUs that CUDA shows to this process.
      driver: name or path of the driver's library.
    """
    device, total = ctypes.c_int(), ctypes.c_size_t()
    try:
        library = ctypes.CDLL(driver)
        calls = (
            (library.cuInit, 0),
            (library.cuDeviceGet, ctypes.byref(device), index),
            (library.cuDeviceTotalMem_v2, ctypes.byref(total), device),
        )
    except (OSError, AttributeError):
        return None
    return total.value if all(call(*arguments) == 0 for call, *arguments in calls) else None


def gpus_are_whole() -> bool:
    """Whether no visible GPU is divided into logical ones, which NCCL refuses."""
    return len(tf.config.list_logical_devices("GPU")) <= len(tf.config.get_visible_devices("GPU"))
