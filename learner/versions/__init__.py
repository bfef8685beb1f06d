"""Scores, judges and publishes versions."""
