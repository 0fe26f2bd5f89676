"""Checks of this machine for a bug report. Each check returns a section of facts and problems."""
