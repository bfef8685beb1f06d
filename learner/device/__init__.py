"""The device: its health, its memory, and how training shares it with serving."""
