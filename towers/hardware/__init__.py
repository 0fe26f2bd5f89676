"""The machine at hand: its cores, their instructions and kernels, NUMA nodes, limits of control groups, GPUs."""
