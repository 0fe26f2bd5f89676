"""A folder that looks like Linux's description of a machine's CPUs."""

import pathlib


def machine(folder: pathlib.Path, *, nodes: int, cores_per_node: int, threads_per_core: int = 1) -> pathlib.Path:
    """A root with sys/devices/system. CPUs are numbered as by Linux: all cores' first threads, then the second."""
    cores = nodes * cores_per_node
    system = folder / "sys/devices/system"
    for cpu in range(cores * threads_per_core):
        siblings = [cpu % cores + thread * cores for thread in range(threads_per_core)]
        _write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, siblings)))
    for node in range(nodes):
        first = node * cores_per_node
        starts = [first + thread * cores for thread in range(threads_per_core)]
        ranges = [f"{start}-{start + cores_per_node - 1}" for start in starts]
        _write(system / f"node/node{node}/cpulist", ",".join(ranges))
    return folder


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
