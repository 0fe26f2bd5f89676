"""Separate networks for processes of this machine: private ones, and hosts with links of a given rate."""
