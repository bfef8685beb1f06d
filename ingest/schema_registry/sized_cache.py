"""A cache that is bounded in bytes; the entry that was not used for longest is removed first."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class SizedCache(Generic[_Key, _Value]):
    """Values by key, each with the bytes that it holds. Not thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._bytes = 0

    def __contains__(self, key: _Key) -> bool:
        return key in self._entries

    def get(self, key: _Key) -> _Value | None:
        """Return the value of a key, which counts as used now; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: _Key, value: _Value, size: int) -> None:
        """Set the value of a key, and remove others until all fit; one that does not fit alone stays alone."""
        _, before = self._entries.pop(key, (None, 0))
        self._entries[key] = value, size
        self._bytes += size - before
        while self._bytes > self._most_bytes and len(self._entries) > 1:
            _, (_, removed) = self._entries.popitem(last=False)
            self._bytes -= removed
