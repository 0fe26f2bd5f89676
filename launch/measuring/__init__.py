"""The parts of the benchmark: what it measures, how it runs the measurements, and how it reports the results."""
