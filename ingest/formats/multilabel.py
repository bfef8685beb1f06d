"""Labels of several classes: from the lists that messages hold to a bool for each class.

Legend: N events, C classes.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.events.schema import Label
from ingest.formats.base import Decoded


def multi_hot(label: Label, classes: Sequence[Sequence[Any]]) -> NDArray[np.bool_]:
    """Return which classes each event has, bool `[N, C]`; they are given by name where the schema names them."""
    flat = list(chain.from_iterable(classes))
    if label.names is not None:
        ids = {name: index for index, name in enumerate(label.names)}
        flat = [ids[name] for name in flat]
    return multi_hot_from_counts(label, np.array(list(map(len, classes)), np.int64), np.array(flat, np.int64))


def multi_hot_from_counts(label: Label, counts: NDArray[np.int64], flat: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which classes each event has, bool `[N, C]`: `counts` `[N]` of the class numbers in `flat`, in turn."""
    has_NC = np.zeros((len(counts), *label.shape), np.bool_)
    has_NC[np.repeat(np.arange(len(counts)), counts), flat] = True
    return has_NC


def without_repeats(decoded: Decoded, counts: Sequence[int], label: Label) -> Decoded:
    """Reject events whose label has fewer classes than the `counts` that it lists.

    That is also how zeros and ones for all classes, which are another way to write such labels, are noticed.
    """
    repeats = np.asarray(decoded.columns["label"].sum(axis=1) != np.array(counts, np.int64))
    return decoded.without(repeats, f"{label.name} lists a class twice") if repeats.any() else decoded
