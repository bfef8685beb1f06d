"""Nearest neighbours of held events, in a process of its own that uses FAISS."""
