"""Gives the device to serving while requests wait."""
