"""Erasure: which events were erased, and the log that remembers it."""
