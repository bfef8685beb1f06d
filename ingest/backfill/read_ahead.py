"""Reads one item ahead in a thread, so that storage and decoding work at the same time."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from datetime import timedelta
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ReadAhead(Generic[_T]):
    """The items of an iterator, which is made again after an error. Used by one thread."""

    def __init__(self, make: Callable[[], Iterator[_T]]) -> None:
        """`make` returns an iterator over the items that `poll` has not returned; another thread iterates over it."""
        self._make = make
        self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._items: Iterator[_T] = iter(())
        self._next: Future[_T | None] | None = None

    def poll(self, timeout: timedelta) -> _T | None:
        """Return the next item, or None when there is none in time, or none left; raises what the iterator raises."""
        if self._next is None:
            self._items = self._make()
            self._next = self._pool.submit(next, self._items, None)
        try:
            item = self._next.result(timeout.total_seconds())
        except NotYetError:
            if not self._next.done():
                return None
            self._next = None
            raise
        except BaseException:
            self._next = None
            raise
        self._next = None if item is None else self._pool.submit(next, self._items, None)
        return item

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._pool.shutdown(wait=True, cancel_futures=True)
