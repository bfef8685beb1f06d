"""A cut whose events lie elsewhere than the store's are to, or that was made under another admission policy.

Legend: H events held, n events of a chunk, R bytes of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.events.identity import identity_hash
from replay.checkpoint.slot_allocator import Slots
from replay.reservoir.admission import Admission, Offered
from replay.snapshot import Contents
from replay.tiers.hierarchy import Tiers

Rows = Callable[[slice, NDArray[np.uint64]], tuple[Tensor, NDArray[np.bool_]]]
"""Reads the rows of a slice of the events, whose identities are told too, uint8 `[n, R]`, and tells which are whole."""
_CHUNK = 1024


def converted(
    contents: Contents, admission: Admission, seed: int, weights: Callable[[Tensor], Tensor], rows: Rows
) -> Contents:
    """Return contents with the priorities and groups that the events have under `admission`; the rest is the same.

    Args:
        contents: of a cut.
        admission: the policy from now on.
        seed: of the store.
        weights: the weights of n events, by their rows uint8 `[n, R]`.
        rows: of the events.
    """
    index = contents.index.copy()
    for chunk, events, identity in _chunks(index, contents, seed):
        weight = weights(rows(chunk, identity)[0]).numpy()
        # A row that cannot be read has any weight; it is found lost later.
        weight = np.where(weight >= 0, weight, 1).astype(np.float32)
        events["priority"] = admission.priorities(Offered(identity, weight, events["time_s"]))
        events["group"] = admission.group(events["label"].astype(np.int64), np.zeros(len(events), np.int16))
    stands = replace(
        contents.standing,
        policy=admission.name,
        thresholds=np.full(admission.groups, np.inf),
        offered=np.bincount(index["group"], minlength=admission.groups).astype(np.int64),
        weight=contents.standing.weight * len(index) / max(1, int(contents.standing.offered.sum())),
    )
    return replace(contents, standing=stands, index=index)


def move(
    index: NDArray[np.void], contents: Contents, seed: int, rows: Rows, slots: Slots, tiers: Tiers
) -> NDArray[np.bool_]:
    """Write the rows of events, ENTRY `[H]`, into new slots, which `index` then names; return which could be had."""
    found = np.ones(len(index), np.bool_)
    for chunk, events, identity in _chunks(index, contents, seed):
        rows_nR, whole = rows(chunk, identity)
        found[chunk] = whole
        taken = slots.take(int(whole.sum()))
        events["slot"][whole] = taken
        tiers.write(taken.astype(np.int64), identity[whole], rows_nR.numpy()[whole].__getitem__)
    return found


def _chunks(
    index: NDArray[np.void], contents: Contents, seed: int
) -> Iterator[tuple[slice, NDArray[np.void], NDArray[np.uint64]]]:
    """Yield slices of events with views of them and their identities."""
    bases = np.array(contents.standing.bases, np.uint64)
    for begin in range(0, len(index), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        events = index[chunk]
        yield chunk, events, identity_hash(bases[events["partition"]], events["offset"], events["row"], seed)
