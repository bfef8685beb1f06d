"""Checks of what `[stream]` reads besides the topics."""
