"""The checksum of a record on disk and in Redis: 8 bytes after the row.

It is the CRC-32C of the row xor the event's identity. It detects a flipped bit, a write that never arrived, and the row
of another event in the same slot.

Legend: n rows of a call.
"""

from collections.abc import Sequence

import crc32c
import numpy as np
from numpy.typing import NDArray

CHECKSUM = np.dtype("<u8")


def row_sums(rows: memoryview, row_bytes: int, positions: Sequence[int]) -> NDArray[np.uint64]:
    """Return the CRC-32C of the rows at n positions; xor the event's identity it is the record's checksum."""
    sums = (crc32c.crc32c(rows[at * row_bytes : (at + 1) * row_bytes]) for at in positions)
    return np.fromiter(sums, np.uint64, len(positions))
