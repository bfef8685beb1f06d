"""The Python API, whose names `anabranch` has: over the objects of the daemon, with data as notebooks have it."""
