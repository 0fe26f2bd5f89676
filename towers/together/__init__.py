"""One graph for all towers of a process.

copies_in_one.py     copies of the first tower's graph, with the devices of each tower
traced_together.py   towers that exchange sums, traced once
"""
