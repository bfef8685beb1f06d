"""Blocks to batches, and the outcome and position of each event."""
