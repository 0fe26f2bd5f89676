"""ZeRO over the workers of a ring: each has its part of optimizer state, gradients or parameters."""
