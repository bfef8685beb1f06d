"""A cut that was made under another admission policy: its events compete anew, by the priorities of the new one.

Legend: H events held, n events of a chunk, R bytes of a row.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.identity import identity_hash
from replay.admission import Admission, Offered
from replay.contents import Contents

Rows = Callable[[slice, NDArray[np.uint64]], Tensor]
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
        rows: reads the rows of a slice of the events, whose identities are told too.
    """
    index, bases = contents.index.copy(), np.array(contents.standing.bases, np.uint64)
    for begin in range(0, len(index), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        events = index[chunk]
        identity = identity_hash(bases[events["partition"]], events["offset"], events["row"], seed)
        weight = weights(rows(chunk, identity)).numpy()
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
