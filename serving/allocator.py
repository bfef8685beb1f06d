"""How much freed memory the C library keeps."""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As glibc's malloc.h has them."""
_MOST_BYTES = 8_000_000


def return_freed_memory() -> None:
    """Have blocks of 8 MB and more go back to the system as soon as they are freed, where the C library is glibc.

    Left to itself it comes to take them from its heap, once one of 32 MB was freed, and keeps up to 64 MB there: a few
    requests of the largest size cost that for good.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_BYTES)
