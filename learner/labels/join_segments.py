"""The events and labels of a join in the segments of a checkpoint; `join_checkpoint.py` has the layout."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from learner.labels.waiting_table import WAITING
from learner.state_dir.checkpoint import SEGMENT
from replay.checkpoint.segments import Segment, Tensors, assemble

PART = "labels"
"""The name of the part, and its key in the state of a checkpoint."""
LABEL_SEGMENT = f"{SEGMENT}{PART}-"
"""Prefix of the parts with events."""
KEPT_SEGMENT = f"{SEGMENT}kept-"
"""Prefix of the parts with labels."""


def segments_of(tensors: Tensors, names: Sequence[tuple[str, int]], prefix: str) -> list[Segment]:
    """Return the segments of events or labels by their names and lengths, from the tensors of the part."""
    return [
        Segment(name, np.unpackbits(tensors[f"live.{prefix}{name}"].numpy(), count=rows).astype(np.bool_))
        for name, rows in names
    ]


def assembled(
    segments: Sequence[Segment], prefix: str, parts: Mapping[str, Tensors], entry: np.dtype[np.void]
) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    """Return the held events or labels of segments, and which of all held ones these are, without damaged segments."""
    entries, _, _ = assemble(segments, lambda segment: parts.get(f"{prefix}{segment.name}"), entry)
    present = [np.full(segment.held, f"{prefix}{segment.name}" in parts) for segment in segments]
    return entries, np.concatenate([np.zeros(0, np.bool_), *present])


def entries_of(tensors: Tensors) -> NDArray[np.void]:
    """Return the events of a segment, WAITING, without a copy."""
    return tensors["index"].numpy().reshape(-1).view(WAITING)
