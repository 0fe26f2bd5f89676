"""Processes that are started, watched, stopped and reported on; planned faults and signals."""
