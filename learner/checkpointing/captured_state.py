"""The input of a checkpoint, copied between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from learner.labels.join_checkpoint import CapturedJoin
from replay.checkpoint.capture import CapturedStore


@dataclass(frozen=True)
class CapturedState:
    """The input of a checkpoint, copied at one step boundary."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    """Plain values, which are encoded before the next step can change them."""
    store: CapturedStore | None
    """The store's part, which is read in the background."""
    labels: CapturedJoin | None = None
    """The part of the events that wait for labels, likewise; the checkpointer adds it."""


def encoded(captured: CapturedState) -> CapturedState:
    """Return captured state with its values encoded, since their sources change while the tensors are written."""
    state = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in captured.state.items()}
    return replace(captured, state=state)
