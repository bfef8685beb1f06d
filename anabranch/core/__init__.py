"""Shared by all packages, and imports none of them: errors, durations, back-off, addresses, files."""
