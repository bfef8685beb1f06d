"""A set of recent keys in fixed memory (a Bloom filter in two generations: Bloom 1970).

Legend: n keys of a call.
"""

import numpy as np
from numpy.typing import NDArray

from ingest.events.identity import mix

_BITS = 2**22
_HASHES = 4
_MOST = 2**19
"""Keys of a generation; then one in 40 keys that were not added is found."""


class RecentKeys:
    """The last half to one million keys that were added, in 8 MiB; a few others are found too. A key of 0 is no key."""

    def __init__(self) -> None:
        self._new, self._old = np.zeros(_BITS, np.bool_), np.zeros(0, np.bool_)
        self._count = 0

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Add n keys."""
        if self._count > _MOST:
            self._old, self._new, self._count = self._new, np.zeros(_BITS, np.bool_), 0
        self._new[self._bits(keys)] = True
        self._count += len(keys)

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of n keys were added recently, bool `[n]`."""
        bits_Hn = self._bits(keys)
        found: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        for bits in (self._new, self._old):
            if len(bits):
                found |= bits[bits_Hn].all(axis=0)
        found &= keys != 0
        return found

    @staticmethod
    def _bits(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the positions of n keys, `[_HASHES, n]`: parts of one hash of 64 bits, and of another."""
        first, second = mix(keys), mix(~keys)
        hashes = [first, first >> np.uint64(32), second, second >> np.uint64(32)]
        return np.stack([(each % np.uint64(_BITS)).astype(np.int64) for each in hashes[:_HASHES]])
