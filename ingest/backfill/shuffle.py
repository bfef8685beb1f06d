"""Shuffles the rows of windows of a file, in the same way each time: an offset always is the same row."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.backfill.row_tables import FileRows


def shuffled(tables: Iterator[FileRows], window: int, seed: int, file: str) -> Iterator[FileRows]:
    """Yield tables of `window` rows, the last of fewer, each with its rows in an order of the seed.

    `tables` are consecutive, and begin at a multiple of `window` rows.
    """
    parts: list[Any] = []
    first: FileRows | None = None
    for table, row, hint in tables:
        begin = 0
        while begin < table.num_rows:
            first = first or FileRows(None, row + begin, hint)
            taken = min(table.num_rows - begin, window - sum(part.num_rows for part in parts))
            parts.append(table.slice(begin, taken))
            begin += taken
            if sum(part.num_rows for part in parts) == window:
                yield first._replace(table=_permuted(parts, first.row, seed, file))
                parts, first = [], None
    if first is not None:
        yield first._replace(table=_permuted(parts, first.row, seed, file))


def _permuted(parts: list[Any], first: int, seed: int, file: str) -> Any:
    table = pa.concat_tables(parts)
    return table.take(pa.array(order_of(table.num_rows, seed, file, first)))


def order_of(rows: int, seed: int, file: str, first: int) -> NDArray[np.int64]:
    """Return the order of a window's rows, int64 `[rows]`; `first` is the window's first row in the file."""
    digest = hashlib.blake2b(f"{seed} {file} {first}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).permutation(rows)
