"""A tower's function as a graph: traced once, optimized once, compiled early, called on many devices."""
