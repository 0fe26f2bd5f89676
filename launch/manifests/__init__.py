"""Kubernetes documents for a ring of pods, as plain dictionaries; one file for each kind."""
