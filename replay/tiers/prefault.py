"""Creates pages of memory before they are written.

The system creates a page at the first write to it, and the writer waits: milliseconds of a step for a huge page, which
the memory tier uses. A thread creates the pages a little ahead of the writes.
"""

import ctypes
import sys
import threading

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: creates pages as a write does, and leaves their contents unchanged."""
_AHEAD_BYTES = 8_000_000
_PORTION_BYTES = 2 << 20
_PAGE = 4096


class Pages:
    """The pages of a block of memory that is written roughly in ascending order.

    If the system cannot create pages ahead, or the memory is small, each page is created when it is written.
    """

    def __init__(self, address: int, size: int) -> None:
        """Take `size` bytes from an address on, which must stay allocated until `close`."""
        self._begin = -(-address // _PAGE) * _PAGE
        self._end = (address + size) // _PAGE * _PAGE
        self._requested = self._begin
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if sys.platform == "linux" and self._end - self._begin > _PORTION_BYTES:
            self._thread = threading.Thread(target=self._create, name="pages", daemon=True)
            self._thread.start()
            self.request_ahead(0)

    @property
    def all_requested(self) -> bool:
        """Whether no page is left to request."""
        return self._thread is None or self._requested == self._end

    def request_ahead(self, size: int) -> None:
        """Have the pages created that follow the first `size` bytes, which are written next. Any thread may call it."""
        end = min(self._end, self._begin + size + _AHEAD_BYTES)
        # In portions, so that a writer does not wake the thread each time.
        if end > self._requested + _PORTION_BYTES or end == self._end:
            with self._changed:
                self._requested = max(end, self._requested)
                self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the last portion is created."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _create(self) -> None:
        # The module mmap would keep the GIL during the call.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        created = self._begin
        while created < self._end:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or created < self._requested)  # noqa: B023 called at once
            if self._closed or madvise(created, min(_PORTION_BYTES, self._end - created), _POPULATE_WRITE):
                return
            created += _PORTION_BYTES
