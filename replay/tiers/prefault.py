"""Pages of memory that are there before they are written.

The system makes a page when it is first written, and whoever writes waits: for a huge page, which the memory tier asks
for, milliseconds of a step. A thread has them made a little ahead of what is written.
"""

import ctypes
import sys
import threading

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: makes pages as a write does, and leaves what they hold as it is."""
_AHEAD_BYTES = 8_000_000
_PORTION_BYTES = 2 << 20
_PAGE = 4096


class Pages:
    """Those of a memory that is written from its first byte on, more or less. Any thread may call `reach`.

    Where the system makes none ahead of time, or the memory is small, they are made when they are written.
    """

    def __init__(self, address: int, size: int) -> None:
        """Take the memory of `size` bytes from an address on, which has to stay until `close`."""
        self._begin = -(-address // _PAGE) * _PAGE
        self._end = (address + size) // _PAGE * _PAGE
        self._wanted = self._begin
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if sys.platform == "linux" and self._end - self._begin > _PORTION_BYTES:
            self._thread = threading.Thread(target=self._make, name="pages", daemon=True)
            self._thread.start()
            self.reach(0)

    @property
    def asked_for(self) -> bool:
        """Whether there are none left to be asked for."""
        return self._thread is None or self._wanted == self._end

    def reach(self, size: int) -> None:
        """Hear that the first `size` bytes are about to be written, and have those made that follow."""
        wanted = min(self._end, self._begin + size + _AHEAD_BYTES)
        # By portions: whoever writes is not to wake the thread each time.
        if wanted > self._wanted + _PORTION_BYTES or wanted == self._end:
            with self._changed:
                self._wanted = max(wanted, self._wanted)
                self._changed.notify()

    def close(self) -> None:
        """Make no more, and wait until the last portion is made."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _make(self) -> None:
        # The module mmap would keep the interpreter's lock meanwhile.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        made = self._begin
        while made < self._end:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or made < self._wanted)  # noqa: B023 it is called at once
            if self._closed or madvise(made, min(_PORTION_BYTES, self._end - made), _POPULATE_WRITE):
                return
            made += _PORTION_BYTES
