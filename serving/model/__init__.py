"""A version in memory, loaded and warmed up."""
