"""Writes checkpoints, and takes erased events out of them."""
