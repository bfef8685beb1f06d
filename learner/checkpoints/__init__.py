"""Checkpoints: their format, when they are written, and how erased events leave them."""
