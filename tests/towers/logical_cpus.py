"""Devices for tests: the first few of the logical CPUs that conftest creates."""

from towers.devices import Devices
from towers.grid import Grid


def cpus(num_towers: int, parameters: int = 0, **spread) -> Devices:
    """Towers on the first CPUs; parameters on the CPU with index `parameters`, or spread over the towers' CPUs.

    Args:
      num_towers: number of towers.
      parameters: index of the CPU for whatever is not spread.
      **spread: `sharded`, `replicated` or `zero` of `Devices`.
    """
    return Devices(
        towers=tuple(f"/device:CPU:{index}" for index in range(num_towers)),
        parameters=f"/device:CPU:{parameters}",
        **spread,
    )


def cpus_in_groups(grid: str, **spread) -> Devices:
    """Towers of several CPUs each, by a grid such as 'data:2,slice:2'; `spread` as for `cpus`."""
    parsed = Grid.parse(grid)
    devices = cpus(parsed.num_devices, **spread)
    return devices.grouped(parsed.groups(devices.towers))
