"""The host's part of synchronous steps: batches, executions, reports. `strategies/synchronous.py` joins them.

training_batches.py                      the batches of a process, step after step
executions.py, execution_length.py       starts steps, one or several in an execution; how many
outcomes_on_host.py, late_reports.py     their outcomes; reports that come one call late
step_report.py                           one report of several steps
"""
