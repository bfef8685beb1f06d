"""How often keys were seen of late, in a table of fixed size.

Cormode & Muthukrishnan 2005, "An improved data stream summary: the count-min sketch", with the conservative update of
Estan & Varghese 2002, and counts that are halved from time to time (Einziger, Friedman & Manes 2017, "TinyLFU").

Legend: m keys, D rows of the table, W columns.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from learner.model.features.mixing import mixed

DEPTH = 4
MOST = 255
"""The largest count."""

Counts = NDArray[np.uint8]


def width_for(rows: int) -> int:
    """Return the columns of the sketch of a vocabulary: 16 or more for each row, a power of two."""
    return 1 << (16 * rows - 1).bit_length()


def add(table: Counts, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count each of m distinct keys; return how often each was seen, int64 `[m]`: exact, or too much.

    `table` is uint8 `[D, W]`, with W a power of two.
    """
    cells = _cells(keys, table.shape[1])
    depth = np.arange(len(table))[:, None]
    seen: NDArray[np.int64] = np.minimum(table[depth, cells].min(axis=0) + counts, MOST)
    np.maximum.at(table, (np.broadcast_to(depth, cells.shape), cells), seen.astype(np.uint8))
    return seen


def halve(table: Counts) -> None:
    """Let all that was seen so far count half as much."""
    table >>= 1


def _cells(keys: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return the column of each key in each row, int64 `[D, m]`."""
    hashes = torch.from_numpy(keys)
    rows = list[NDArray[np.int64]]()
    for _ in range(DEPTH):
        hashes = mixed(hashes)
        rows.append(hashes.numpy() & (width - 1))
    return np.stack(rows)
