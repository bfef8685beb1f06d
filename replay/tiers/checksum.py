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


def row_sums(
    rows: memoryview, row_bytes: int, positions: Sequence[int], stride: int | None = None
) -> NDArray[np.uint64]:
    """Return the CRC-32C of the rows at n positions; xor the event's identity it is the record's checksum.

    `stride`: bytes from one row to the next, if these are more than `row_bytes`.
    """
    crc, step = crc32c.crc32c, stride or row_bytes
    sums = [crc(rows[at * step : at * step + row_bytes]) for at in positions]
    return np.array(sums, np.uint64)
