"""What tells an event's record from any other, on disk and in Redis: a checksum of 8 bytes behind the row.

It is the CRC-32C of the row, xor the event's identity: so neither a flipped bit, nor a write that never arrived, nor
another event's row in the same place is taken for the event's payload.

Legend: n rows of a call.
"""

from collections.abc import Sequence

import crc32c
import numpy as np
from numpy.typing import NDArray

CHECKSUM = np.dtype("<u8")


def row_sums(rows: memoryview, row_bytes: int, places: Sequence[int]) -> NDArray[np.uint64]:
    """Return the CRC-32C of the rows in n places; xor the event's identity it is the record's checksum."""
    sums = (crc32c.crc32c(rows[place * row_bytes : (place + 1) * row_bytes]) for place in places)
    return np.fromiter(sums, np.uint64, len(places))
