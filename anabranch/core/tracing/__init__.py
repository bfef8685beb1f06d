"""Spans by OpenTelemetry: what a process does for a request, a batch, a step or a version. Off, nothing is imported."""
