"""Starts, supervises and stops processes, and reports how they ended; planned faults; signals."""
