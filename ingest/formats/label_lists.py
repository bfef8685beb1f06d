"""Labels that messages hold as lists of classes: those that an event has, or one at each position.

Legend: N events, C classes, L positions.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import IGNORED, Label
from anabranch.ingest.formats.base import Decoded


def ids_of_classes(label: Label) -> dict[Any, int]:
    """Return the number of each class name; at a position, null and an empty name are IGNORED."""
    ids: dict[Any, int] = {name: index for index, name in enumerate(label.names or ())}
    return ids if label.length is None else {**ids, None: IGNORED, "": IGNORED}


def column_of_lists(label: Label, classes: Sequence[Sequence[Any]]) -> Array:
    """Return the labels of lists, by name where the schema names classes: `column_of_counts`."""
    flat = list(chain.from_iterable(classes))
    if label.names is not None:
        ids = ids_of_classes(label)
        flat = [ids[name] for name in flat]
    elif label.length is not None:
        flat = [IGNORED if each is None else each for each in flat]
    return column_of_counts(label, np.array(list(map(len, classes)), np.int64), np.array(flat, np.int64))


def column_of_counts(label: Label, counts: NDArray[np.int64], flat: NDArray[np.int64]) -> Array:
    """Return labels from `counts` `[N]` of the class numbers in `flat`, in turn.

    They are a bool for each class `[N, C]`, or with `label.length` int64 `[N, L]`, IGNORED after the end of a list.
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    if label.length is None:
        has_NC = np.zeros((len(counts), *label.shape), np.bool_)
        has_NC[rows, flat] = True
        return has_NC
    class_NL = np.full((len(counts), label.length), IGNORED, np.int64)
    position = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = position < label.length
    class_NL[rows[kept], position[kept]] = flat[kept]
    return class_NL


def without_repeats(decoded: Decoded, counts: Sequence[int], label: Label) -> Decoded:
    """Reject events whose label has fewer classes than the `counts` that it lists.

    That is also how zeros and ones for all classes, which are another way to write such labels, are noticed.
    """
    repeats = np.asarray(decoded.columns["label"].sum(axis=1) != np.array(counts, np.int64))
    return decoded.without(repeats, f"{label.name} lists a class twice") if repeats.any() else decoded
