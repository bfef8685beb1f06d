"""Nearest neighbours of held events, in a separate process that uses FAISS."""
