"""Indexes of entries that are rows of arrays: by number, by key and by time."""
