"""Memory that processes share by its descriptor. Imports nothing else of ours: the index process needs it at once."""

import os
import tempfile


def anonymous_file(size: int) -> int:
    """Make a file of so many bytes that has no name, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("anabranch-ring", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
