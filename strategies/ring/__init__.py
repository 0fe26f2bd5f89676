"""Ring: every worker holds a copy of the model; the workers' gradients are summed by all-reduce."""
