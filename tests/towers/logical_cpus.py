"""The devices of tests: the first of the logical CPUs that conftest makes."""

from towers.devices import Devices


def cpus(num_towers: int, parameters: int = 0) -> Devices:
    """Towers on the first CPUs, parameters on CPU number `parameters`."""
    return Devices(
        towers=tuple(f"/device:CPU:{place}" for place in range(num_towers)),
        parameters=f"/device:CPU:{parameters}",
    )
