"""The devices of tests: the first few of the logical CPUs that conftest creates."""

from towers.devices import Devices


def cpus(num_towers: int, parameters: int = 0, **spread) -> Devices:
    """Towers on the first CPUs, parameters on the CPU with index `parameters`, or spread over the towers'.

    Args:
      num_towers: number of towers.
      parameters: index of the CPU of what is not spread.
      **spread: `sharded`, `replicated` or `zero` of `Devices`.
    """
    return Devices(
        towers=tuple(f"/device:CPU:{index}" for index in range(num_towers)),
        parameters=f"/device:CPU:{parameters}",
        **spread,
    )
