"""Recomputation: activations that are not kept for the backward pass, but computed again in it."""
