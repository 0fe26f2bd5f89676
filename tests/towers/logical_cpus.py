"""The devices of tests: the first few of the logical CPUs that conftest creates."""

from towers.devices import Devices


def cpus(num_towers: int, parameters: int = 0, *, sharded: bool = False) -> Devices:
    """Towers on the first CPUs, parameters on the CPU with index `parameters`, or sharded over the towers'."""
    return Devices(
        towers=tuple(f"/device:CPU:{index}" for index in range(num_towers)),
        parameters=f"/device:CPU:{parameters}",
        sharded=sharded,
    )
