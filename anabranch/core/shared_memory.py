"""Memory that processes share by its descriptor. Imports nothing else of ours: the index process must start fast."""

import os
import tempfile


def anonymous_file(size: int) -> int:
    """Create a file of `size` bytes without a name, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("anabranch-ring", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
