"""Which events are held out: the same decision at ingest, and when the label of an event comes later."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.identity import identity_hash, keyed_hash
from anabranch.ingest.settings.stream import HoldOut


def held_out(hold_out: HoldOut, columns: Mapping[str, Array], base: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which of N labelled events are held out, bool `[N]`; `base` is `partition_base` of each.

    By a hash of the group, else of the key, else of the identity: events of one group or key are held out together.
    """
    chosen_by = identity_hash(base, columns["offset"].astype(np.int64), columns["row"].astype(np.int32))
    for name in ("key_hash", "group_hash"):
        own = columns[name].astype(np.uint64)
        chosen_by = np.where(own != 0, own, chosen_by)
    return np.asarray(keyed_hash(chosen_by, hold_out.seed) < np.uint64(int(hold_out.fraction * 2**64)))


def shuffle_seed(hold_out: HoldOut) -> int:
    """Return the seed of the order in which rows of files are read. It is written down, and reveals nothing."""
    return int(keyed_hash(np.zeros(1, np.uint64), hold_out.seed)[0] >> np.uint64(1))
