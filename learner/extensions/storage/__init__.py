"""Uploads of versions, checkpoints and erasures to an object store."""
