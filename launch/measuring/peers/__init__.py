"""Programs of peers that do the work of a group of the benchmark. Each runs alone, without this project."""
