"""The timeline of traced steps: operations with their times, and what each device did in intervals."""
