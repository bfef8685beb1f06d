"""Layers for the user's models that a mesh of ranks divides by itself."""
