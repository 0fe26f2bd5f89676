"""The benchmark's parts: what is measured, how it is run, and what is made of the numbers."""
