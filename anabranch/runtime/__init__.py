"""Processes: entry, signals, exit codes, supervision."""
