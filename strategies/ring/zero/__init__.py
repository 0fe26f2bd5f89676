"""ZeRO over the workers of a ring: each worker holds its part of optimizer state, gradients or parameters."""
