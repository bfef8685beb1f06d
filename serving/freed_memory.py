"""Limits how much freed memory the C library keeps."""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
_MOST_BYTES = 8_000_000


def return_freed_memory() -> None:
    """Return blocks of 8 MB and more to the system as soon as they are freed, if the C library is glibc.

    By default glibc raises its threshold once a block of 32 MB was freed, and keeps up to 64 MB in its heap: a few
    requests of the largest size would cost that permanently.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_BYTES)


def trim_freed_memory() -> None:
    """Return all freed memory to the system now, if the C library is glibc: later blocks cost page faults again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
