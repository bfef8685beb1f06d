"""What the ingest process is decoding, in memory that it shares with the learner: which messages it was when it died.

A library in C or Rust that is given hostile bytes may crash, take all memory, or not return. Nothing in the process can
handle that; the learner reads here, once the process has ended, which messages to blame.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from anabranch.core.errors import AnabranchError

_MOST = 8_192
"""Ranges of a mark: a poll returns no more messages than a slot has rows."""
MARK_BYTES = 8 * (1 + 3 * _MOST)


class OffsetRange(NamedTuple):
    """Offsets `[begin, end)` of the partition of this index."""

    partition: int
    begin: int
    end: int

    @property
    def is_one(self) -> bool:
        """Whether it is a single offset."""
        return self.end == self.begin + 1


class DecodingMark:
    """The offsets that are decoded at this moment; none while nothing is."""

    def __init__(self, memory: memoryview) -> None:
        """Use `MARK_BYTES` of shared memory."""
        numbers = np.frombuffer(memory, np.int64, 1 + 3 * _MOST)
        self._count, self._ranges = numbers[:1], numbers[1:].reshape(_MOST, 3)

    @contextlib.contextmanager
    def of(self, ranges: Sequence[OffsetRange]) -> Iterator[None]:
        """Mark offsets while the block runs.

        The mark stays after an exception that is none of ours: it ends the process, as a crash does.
        """
        n = min(len(ranges), _MOST)
        if n:
            self._ranges[:n] = ranges[:n]
        self._count[0] = n
        try:
            yield
        except AnabranchError:
            self._count[0] = 0
            raise
        self._count[0] = 0

    def read(self) -> list[OffsetRange]:
        """Return the marked offsets."""
        return [OffsetRange(*numbers) for numbers in self._ranges[: int(self._count[0])].tolist()]
