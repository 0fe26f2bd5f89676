"""Layers of a model divided over several devices."""
