"""Kubernetes documents for a cluster of pods, as plain dictionaries, one file for each kind; Slurm scripts."""
