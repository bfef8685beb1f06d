"""Formats of the state directory, shared with serving. Readable without torch where no weights are read."""
